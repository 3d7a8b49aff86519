//! Flags for the parameters that methods and fits declare, and for the other values that have names.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use serde_json::{Map, Value};

use super::terminal::with_flags;
use crate::error::Error;
use crate::kv::format::FORMATS;
use crate::kv::{KvType, RowFormat};
use crate::method::bench::{Bench, BenchParams};
use crate::method::params::MethodParams;
use crate::method::registry::{METHODS, MethodName, bench_params, benches};
use crate::parameters::{Choice, Parameter, ParameterSet, Values, Word, phrase};

type ParseResult<T> = std::result::Result<T, clap::Error>;

/// Adds the flags of a set of parameters to a command.
pub fn flags(command: Command, set: &ParameterSet) -> Command {
    let defaults = (set.defaults)();
    let flag = |parameter| flag(parameter, set.heading, defaults.get(parameter.name));
    command.args(set.parameters.iter().map(flag))
}

fn flag(parameter: &'static Parameter, heading: &'static str, default: Option<&Value>) -> Arg {
    let values = parameter.values;
    let arg = Arg::new(parameter.name)
        .long(flag_name(parameter))
        .help(phrase(parameter.help))
        .help_heading(heading);
    let arg = match values {
        Values::Switch => return arg.action(ArgAction::SetTrue),
        Values::OneOf(words) => arg.value_parser(named(words).map(Value::from)),
        Values::Among(_) | Values::AmongOrNone(_) => {
            let names = PossibleValuesParser::new(values.names());
            arg.value_parser(names.try_map(move |text| values.parse(&text)))
        }
        Values::Whole(..) | Values::CountOrAll | Values::Number(_) => {
            arg.value_parser(move |text: &str| values.parse(text))
        }
    };
    let arg = arg.value_name(parameter.placeholder);
    match default {
        Some(Value::String(text)) => arg.default_value(text.clone()),
        // As people write it: 8 for 8.0.
        Some(Value::Number(n)) => arg.default_value(n.as_f64().unwrap_or_default().to_string()),
        _ => arg,
    }
}

fn flag_name(parameter: &Parameter) -> String {
    parameter.name.replace('_', "-")
}

/// Lists the names of the flags of a set, without their dashes.
pub fn flag_names(set: &ParameterSet) -> Vec<String> {
    set.parameters.iter().map(flag_name).collect()
}

/// Returns the parser of a name.
fn named(words: &'static [Word]) -> PossibleValuesParser {
    let value = |word: &'static Word| PossibleValue::new(word.name).help(phrase(word.help));
    PossibleValuesParser::new(words.iter().map(value))
}

/// Returns the parser of a value that has a name.
pub fn choice<C: Choice + Send + Sync>() -> impl TypedValueParser<Value = C> {
    named(C::WORDS).try_map(|name| C::named(&name).ok_or("unknown name"))
}

/// The parser of the type of a cache: a format, or one each for keys and values. What it parses, `of` makes a value of.
#[derive(Clone)]
pub struct KvParser<T> {
    names: PossibleValuesParser,
    of: fn(&str) -> Option<T>,
}

/// Returns the parser of the type of a cache.
pub fn kv_type() -> KvParser<KvType> {
    kv_type_or([], KvType::named)
}

/// Returns the parser of the type of a cache or of one of `more` names, both of which `of` understands.
pub fn kv_type_or<T>(
    more: impl IntoIterator<Item = PossibleValue>,
    of: fn(&str) -> Option<T>,
) -> KvParser<T> {
    let value = |format: &RowFormat| PossibleValue::new(format.as_str()).help(phrase(format.word().help));
    let names = PossibleValuesParser::new(FORMATS.iter().map(value).chain(more));
    KvParser { names, of }
}

impl<T: Clone + Send + Sync + 'static> TypedValueParser for KvParser<T> {
    type Value = T;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> ParseResult<T> {
        if let Some(parsed) = value.to_str().and_then(self.of) {
            return Ok(parsed);
        }
        if let Some(text) = value.to_str().filter(|text| text.contains('=')) {
            let names: Vec<&str> = FORMATS.iter().map(|format| format.as_str()).collect();
            let wrong = format!(
                "`{text}` does not name a type for keys and one for values, as in k=bf16,v=int8; the types are {}\n",
                names.join(", ")
            );
            return Err(clap::Error::raw(ErrorKind::ValueValidation, wrong).with_cmd(command));
        }
        // No name either: this lists the names.
        self.names.parse_ref(command, arg, value)?;
        Err(clap::Error::new(ErrorKind::InvalidValue).with_cmd(command))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        self.names.possible_values()
    }
}

/// Returns the parser of the name of a method.
pub fn method() -> impl TypedValueParser<Value = MethodName> {
    let names = PossibleValuesParser::new(method_names());
    names.try_map(|name| MethodName::named(&name).ok_or("unknown method"))
}

/// Lists the names of the methods, with their help.
pub fn method_names() -> impl Iterator<Item = PossibleValue> {
    let value = |method: &MethodName| PossibleValue::new(method.as_str()).help(method.help());
    METHODS.iter().map(value)
}

/// Lists the methods that have flags of their own, each with the names of its flags.
pub fn flags_of_methods() -> impl Iterator<Item = (&'static str, Vec<String>)> {
    let flags = |set: ParameterSet| flag_names(&set);
    MethodParams::sets()
        .into_iter()
        .map(move |(name, set)| (name, flags(set)))
}

/// Returns the values of a set's flags by name.
pub fn values(set: &ParameterSet, matches: &ArgMatches) -> Map<String, Value> {
    let value = |parameter: &Parameter| match parameter.values {
        Values::Switch => Some(matches.get_flag(parameter.name).into()),
        _ => matches.get_one::<Value>(parameter.name).cloned(),
    };
    let named = set.parameters.iter();
    named
        .filter_map(|parameter| Some((parameter.name.to_owned(), value(parameter)?)))
        .collect()
}

/// Turns an error in a set of values into one of the command line.
fn refused(e: &Error) -> clap::Error {
    clap::Error::raw(
        ErrorKind::ValueValidation,
        format!("{}\n", with_flags(&e.to_string())),
    )
}

/// The flags of the parameters of random indexes.
#[derive(Clone, Debug)]
pub struct BenchFlags(pub BenchParams);

/// Returns the parameters of random indexes that methods declare.
fn bench_sets() -> impl Iterator<Item = ParameterSet> {
    benches().map(Bench::parameters)
}

impl Args for BenchFlags {
    fn augment_args(command: Command) -> Command {
        bench_sets().fold(command, |command, set| flags(command, &set))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for BenchFlags {
    fn from_arg_matches(matches: &ArgMatches) -> ParseResult<Self> {
        let values = bench_sets().flat_map(|set| values(&set, matches)).collect();
        bench_params(values).map(Self).map_err(|e| refused(&e))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> ParseResult<()> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The flags of all methods.
#[derive(Clone, Debug)]
pub struct MethodFlags(pub MethodParams);

impl Args for MethodFlags {
    fn augment_args(command: Command) -> Command {
        let sets = MethodParams::sets().into_iter();
        sets.fold(command, |command, (_, set)| flags(command, &set))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for MethodFlags {
    fn from_arg_matches(matches: &ArgMatches) -> ParseResult<Self> {
        let sets = MethodParams::sets().into_iter();
        let sets = sets.map(|(name, set)| (name.to_owned(), Value::Object(values(&set, matches))));
        let params = serde_json::from_value(Value::Object(sets.collect()));
        params
            .map(Self)
            .map_err(|e| refused(&Error::usage(e.to_string())))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> ParseResult<()> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
