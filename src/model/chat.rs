//! The chat template of a checkpoint: turns a conversation into one text.
//!
//! Templates are Jinja and expect the environment that transformers offers, which is rebuilt here. They
//! come with the model and are not trusted: their size, nesting, work and output are bounded. The memory
//! that expressions take within a template is not.

use std::ffi::CString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{AutoEscape, Environment, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use super::fields::read_json;
use crate::error::{Error, Result};

type Rendered<T> = std::result::Result<T, minijinja::Error>;

/// A message of a conversation, as templates see it.
#[derive(Clone, Debug, Serialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: &'static str,
    /// Text of the message.
    pub content: String,
}

/// A compiled chat template with the model's special tokens.
pub struct ChatTemplate {
    /// The file that holds the template.
    path: PathBuf,
    environment: Environment<'static>,
}

/// Most bytes of a template; real ones have about ten thousand.
const LONGEST: usize = 1 << 17;

/// Most template instructions per rendering; real templates take a few hundred per message.
const FUEL: u64 = 1_000_000;

/// Bytes of stack for a template, enough for what [`LONGEST`] and [`FUEL`] allow: the engine recurses into
/// chains like `1 + 1 + ...` and nested values without a limit. Only the part in use takes memory.
const STACK: usize = 1 << 28;

/// Bytes that a rendering may have beyond 16 times the bytes of the messages.
const SLACK: usize = 1 << 20;

impl ChatTemplate {
    /// Compiles the chat template of the model in `dir`, if there is one: `chat_template.jinja`, else
    /// that of `tokenizer_config.json`, as in transformers, else that of `chat_template.json`.
    ///
    /// # Errors
    /// A file that cannot be read; a list of templates without a `default`; a syntax error.
    pub fn open(dir: &Path) -> Result<Option<Self>> {
        let Some((path, source)) = find_template(dir)? else {
            return Ok(None);
        };
        if source.len() > LONGEST {
            let what = format!(
                "the chat template has {} bytes, more than {LONGEST}",
                source.len()
            );
            return Err(Error::failed(what).context(path.display()));
        }
        let tokens = special_tokens(dir)?;
        let compiled = with_stack(&path, || {
            let mut environment = environment()?;
            for (name, token) in tokens {
                environment.add_global(name, token);
            }
            environment.add_template_owned("template", without_generation_tags(&source))?;
            Ok(environment)
        })?;
        let environment = compiled.map_err(|e| unusable(&path, &e))?;
        Ok(Some(Self { path, environment }))
    }

    /// Returns the file that holds the template.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renders a conversation, special tokens included; with `add_generation_prompt`, up to where the
    /// assistant's reply starts.
    ///
    /// # Errors
    /// A template that fails, refuses the messages or does not end.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let content_bytes: usize = messages.iter().map(|m| m.content.len()).sum();
        let mut out = Bounded {
            text: Vec::new(),
            limit: content_bytes.saturating_mul(16).saturating_add(SLACK),
            full: false,
        };
        let rendered = with_stack(&self.path, || {
            let context = minijinja::context! {
                messages => Value::from(Serde(messages)),
                add_generation_prompt => add_generation_prompt,
                tools => Value::from(()),
                documents => Value::from(()),
            };
            let template = self.environment.get_template("template")?;
            template.render_captured_to(context, &mut out).map(drop)
        })?;
        match rendered {
            Err(_) if out.full => {
                let what = format!("the chat template writes more than {} bytes", out.limit);
                Err(Error::failed(what).context(self.path.display()))
            }
            Err(e) => Err(unusable(&self.path, &e)),
            Ok(()) => String::from_utf8(out.text).map_err(|e| Error::failed(e.to_string())),
        }
    }
}

/// Runs `work` on a thread with a large stack.
fn with_stack<T: Send>(path: &Path, work: impl FnOnce() -> T + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK);
        let why = match thread.spawn_scoped(scope, work).map(|handle| handle.join()) {
            Ok(Ok(result)) => return Ok(result),
            Ok(Err(_)) => "the chat template cannot be used: its engine failed".to_owned(),
            Err(e) => format!("no thread for the chat template: {e}"),
        };
        Err(Error::failed(why).context(path.display()))
    })
}

fn unusable(path: &Path, e: &minijinja::Error) -> Error {
    let what = match e.kind() {
        ErrorKind::OutOfFuel => "it does not come to an end".to_string(),
        _ => e.to_string(),
    };
    let error = Error::failed(format!("the chat template cannot be used: {what}"));
    error
        .context(path.display())
        .hint("without --chat the prompt is taken as it is; --tokens takes turns as token ids")
}

/// Finds the file that holds the template, and the template's source.
fn find_template(dir: &Path) -> Result<Option<(PathBuf, String)>> {
    let path = dir.join("chat_template.jinja");
    if path.is_file() {
        let source = std::fs::read_to_string(&path).map_err(|e| Error::io(&path, "read", &e))?;
        return Ok(Some((path, source)));
    }
    for name in ["tokenizer_config.json", "chat_template.json"] {
        let path = dir.join(name);
        if path.is_file()
            && let Some(source) = in_json(&path)?
        {
            return Ok(Some((path, source)));
        }
    }
    Ok(None)
}

/// Reads `chat_template` of a JSON file: a string, or a list whose entry named `default` is taken.
fn in_json(path: &Path) -> Result<Option<String>> {
    let value = read_json(path)?;
    let named = |template: &serde_json::Value| {
        (template["name"] == "default").then(|| template["template"].as_str().map(String::from))?
    };
    let (source, wrong) = match &value["chat_template"] {
        serde_json::Value::Null => return Ok(None),
        serde_json::Value::Array(list) => (
            list.iter().find_map(named),
            "no `chat_template` has the name `default`",
        ),
        other => (
            other.as_str().map(String::from),
            "`chat_template` is neither a string nor a list",
        ),
    };
    let wrong = || Error::failed(wrong).context(path.display());
    source.map(Some).ok_or_else(wrong)
}

/// Reads the special tokens that templates know by name: `bos_token`, `eos_token` and so on.
fn special_tokens(dir: &Path) -> Result<Vec<(String, Value)>> {
    let path = dir.join("tokenizer_config.json");
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let config = read_json(&path)?;
    let text = |token: &serde_json::Value| {
        let text = token.as_str().or_else(|| token.get("content")?.as_str());
        text.map(Value::from)
    };
    let fields = config.as_object().into_iter().flatten();
    Ok(fields
        .filter_map(|(name, value)| match name.as_str() {
            "additional_special_tokens" => {
                let tokens = value.as_array()?.iter().filter_map(text);
                Some((name.clone(), tokens.collect()))
            }
            _ if name.ends_with("_token") => Some((name.clone(), text(value)?)),
            _ => None,
        })
        .collect())
}

/// Makes the environment that transformers offers to templates.
fn environment() -> Rendered<Environment<'static>> {
    let mut environment = Environment::new();
    environment.set_syntax(
        SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()?,
    );
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", |message: String| -> Rendered<String> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", strftime_now);
    Ok(environment)
}

/// Replaces the tags that mark the assistant's text for training, which have no effect here.
fn without_generation_tags(source: &str) -> String {
    let (mut out, mut rest) = (String::new(), source);
    while let Some(start) = rest.find("{%")
        && let Some(len) = rest[start..].find("%}")
    {
        let (before, after) = rest.split_at(start + len);
        let (text, tag) = before.split_at(start);
        out += text;
        match tag[2..].trim_matches(|c: char| c.is_whitespace() || "-+".contains(c)) {
            "generation" => out += &tag.replace("generation", "if true"),
            "endgeneration" => out += &tag.replace("endgeneration", "endif"),
            _ => out += tag,
        }
        rest = after;
    }
    out + rest
}

/// Formats the local time as C and Python do.
fn strftime_now(format: &str) -> Rendered<String> {
    let format = CString::new(format)
        .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e.to_string()))?;
    let mut text = [0u8; 256];
    // SAFETY: `tm` is a plain struct that `localtime_r` fills; `strftime` writes at most
    // `text.len()` bytes and returns how many.
    let len = unsafe {
        let now = libc::time(std::ptr::null_mut());
        let mut tm: libc::tm = std::mem::zeroed();
        libc::localtime_r(&now, &mut tm);
        libc::strftime(text.as_mut_ptr().cast(), text.len(), format.as_ptr(), &tm)
    };
    Ok(String::from_utf8_lossy(&text[..len]).into_owned())
}

/// Serialises a value like Python's `json.dumps` as transformers calls it: no escapes for HTML, and
/// separators with spaces.
fn tojson(value: Value, options: Kwargs) -> Rendered<String> {
    let failed = |e: serde_json::Error| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string());
    let indent: Option<u8> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let value = match sort_keys {
        Some(true) => Value::from(Serde(serde_json::to_value(&value).map_err(failed)?)),
        _ => value,
    };
    let mut out = Vec::new();
    match indent {
        Some(n) => {
            let indent = vec![b' '; n.into()];
            let pretty = PrettyFormatter::with_indent(&indent);
            value.serialize(&mut Serializer::with_formatter(&mut out, pretty))
        }
        None => {
            let [item, key] = separators
                .and_then(|s| s.try_into().ok())
                .unwrap_or_else(|| [", ".to_string(), ": ".to_string()]);
            value.serialize(&mut Serializer::with_formatter(&mut out, Spaced { item, key }))
        }
    }
    .map_err(failed)?;
    let text = String::from_utf8_lossy(&out).into_owned();
    Ok(match ensure_ascii {
        Some(true) => ascii(&text),
        _ => text,
    })
}

/// Escapes every non-ASCII character as `\uXXXX`; in JSON such characters occur only within strings.
fn ascii(json: &str) -> String {
    let escape = |unit: &mut u16| format!("\\u{unit:04x}");
    let one = |c: char| match c {
        _ if c.is_ascii() => c.to_string(),
        _ => c.encode_utf16(&mut [0; 2]).iter_mut().map(escape).collect(),
    };
    json.chars().map(one).collect()
}

/// A JSON formatter that writes one line with the given separators.
struct Spaced {
    item: String,
    key: String,
}

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        let separator = if first { "" } else { &self.item };
        out.write_all(separator.as_bytes())
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.begin_array_value(out, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key.as_bytes())
    }
}

/// A text buffer with a maximum length.
struct Bounded {
    text: Vec<u8>,
    limit: usize,
    full: bool,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.text.len() + bytes.len() > self.limit {
            self.full = true;
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
