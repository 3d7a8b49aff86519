//! The part of sharded work that one task does: `--shard` for blocks of text, `--layers` for layers. In array jobs,
//! the scheduler's variables number the tasks.

use std::ops::Range;

use crate::dump::MAX_SHARDS;
use crate::error::{Error, Result};

/// One of several equal tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Task `index` of `count`, from 0: `I/N`.
    Of {
        /// Number of the task.
        index: usize,
        /// Number of tasks.
        count: usize,
    },
    /// The task that the scheduler's variables number, of as many as they or the user say: `auto`, `auto/N`.
    Auto(Option<usize>),
}

/// The layers that one task fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerShare {
    /// Layers A to B - 1: `A..B`.
    Range(Range<usize>),
    /// One of several ranges of about equal length.
    Share(Share),
}

/// Parses `I/N`, `auto` or `auto/N`.
pub fn parse_share_of(text: &str) -> std::result::Result<Share, String> {
    let expected = || "expected I/N with 0 <= I < N, such as 0/8, or auto, or auto/N".to_owned();
    let (index, count) = match text.trim().split_once('/') {
        Some((index, count)) => (index, Some(count.parse().map_err(|_| expected())?)),
        None => (text.trim(), None),
    };
    match (index, count) {
        (_, Some(0)) => Err(expected()),
        ("auto", count) => Ok(Share::Auto(count)),
        (index, Some(count)) => match index.parse() {
            Ok(index) if index < count && count <= MAX_SHARDS => Ok(Share::Of { index, count }),
            _ => Err(expected()),
        },
        _ => Err(expected()),
    }
}

/// Parses `A..B`, or what [`parse_share_of`] parses.
pub fn parse_layers(text: &str) -> std::result::Result<LayerShare, String> {
    let expected = "expected A..B (layers A to B - 1), J/M, auto or auto/M";
    let Some((first, end)) = text.trim().split_once("..") else {
        let share = parse_share_of(text).map(LayerShare::Share);
        return share.map_err(|_| expected.to_owned());
    };
    match (first.parse(), end.parse()) {
        (Ok(first), Ok(end)) if first < end => Ok(LayerShare::Range(first..end)),
        _ => Err(expected.to_owned()),
    }
}

/// Reads a variable of the environment.
pub type Variable<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Reads a variable of this process's environment.
pub fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

impl Share {
    /// Returns the number of the task, from 0, and the number of tasks. Variables are read for `auto` alone: those of
    /// Slurm's job arrays, else that of Kubernetes' Indexed Jobs.
    ///
    /// # Errors
    /// The variables are missing, or number no task of these.
    pub fn resolve(self, flag: &str, variable: Variable) -> Result<(usize, usize)> {
        let given = match self {
            Self::Of { index, count } => return Ok((index, count)),
            Self::Auto(count) => count,
        };
        let number = |name: &str| -> Result<Option<usize>> {
            let Some(text) = variable(name) else {
                return Ok(None);
            };
            let wrong = |_| {
                let error = Error::usage(format!("{name}={text} is not a whole number"));
                error.hint(format!("give {flag} I/N in place of {flag} auto"))
            };
            text.trim().parse().map(Some).map_err(wrong)
        };
        let (name, task) = match (number(TASK)?, number(INDEX)?) {
            (Some(task), _) => (TASK, task),
            (None, Some(index)) => (INDEX, index),
            (None, None) => {
                let error = Error::usage(format!("{flag} auto: neither {TASK} nor {INDEX} is set"));
                return Err(error.hint(format!(
                    "run this in a job array (Slurm) or an Indexed Job (Kubernetes), or give {flag} I/N"
                )));
            }
        };
        let (index, count) = match (given, name) {
            // With a given count, tasks number themselves: an array of a few of them does these again.
            (Some(count), _) => (Some(task), count),
            (None, INDEX) => {
                let error = Error::usage(format!(
                    "{flag} auto: {INDEX} does not tell how many tasks there are"
                ));
                return Err(error.hint(format!("give {flag} auto/N, with N = the Job's `completions`")));
            }
            (None, _) => {
                let missing = || {
                    let error = Error::usage(format!("{flag} auto: {COUNT} is not set"));
                    error.hint(format!("give {flag} auto/N, with N = the number of tasks"))
                };
                let count = number(COUNT)?.ok_or_else(missing)?;
                let first = number("SLURM_ARRAY_TASK_MIN")?.unwrap_or(0);
                let step = number("SLURM_ARRAY_TASK_STEP")?.unwrap_or(1).max(1);
                let behind = task.checked_sub(first).filter(|behind| behind % step == 0);
                (behind.map(|behind| behind / step), count)
            }
        };
        match index {
            Some(index) if index < count => Ok((index, count)),
            _ => {
                let error = Error::usage(format!("{flag} auto: {name}={task} is not one of {count} tasks"));
                Err(error.hint(format!(
                    "number the tasks 0 to {}, and give {flag} auto/{count} if the array has gaps",
                    count.saturating_sub(1)
                )))
            }
        }
    }
}

/// Slurm's number of the task within its array.
const TASK: &str = "SLURM_ARRAY_TASK_ID";
/// Slurm's number of tasks of the array.
const COUNT: &str = "SLURM_ARRAY_TASK_COUNT";
/// Kubernetes' number of the pod within its Indexed Job.
const INDEX: &str = "JOB_COMPLETION_INDEX";

impl LayerShare {
    /// Names the part before the number of layers is known: `A..B`, or `J/M`.
    ///
    /// # Errors
    /// Those of [`Share::resolve`].
    pub fn number(&self, variable: Variable) -> Result<String> {
        match self {
            Self::Range(layers) => Ok(format!("{}..{}", layers.start, layers.end)),
            Self::Share(share) => {
                let (index, count) = share.resolve("--layers", variable)?;
                Ok(format!("{index}/{count}"))
            }
        }
    }

    /// Returns the layers of this task of a model with `n_layers`.
    ///
    /// # Errors
    /// The model has fewer layers than the range or the number of tasks says; those of [`Share::resolve`].
    pub fn resolve(&self, n_layers: usize, variable: Variable) -> Result<Range<usize>> {
        let refused = |what: String| {
            let error = Error::usage(format!("--layers: {what}, but the model has {n_layers} layers"));
            Err(error.hint(format!(
                "layers count from 0: the last one is {}",
                n_layers.saturating_sub(1)
            )))
        };
        match self {
            Self::Range(layers) if layers.end <= n_layers => Ok(layers.clone()),
            Self::Range(layers) => refused(format!("layers {}..{} were asked for", layers.start, layers.end)),
            Self::Share(share) => match share.resolve("--layers", variable)? {
                (index, count) if count <= n_layers => Ok(layer_ranges(n_layers, count).swap_remove(index)),
                (_, count) => refused(format!("{count} tasks were asked for")),
            },
        }
    }
}

/// Divides layers into `count` ranges of about equal length, as `--layers J/M` does.
pub fn layer_ranges(n_layers: usize, count: usize) -> Vec<Range<usize>> {
    let first = |part: usize| part * n_layers / count;
    (0..count).map(|part| first(part)..first(part + 1)).collect()
}

/// Returns the smallest number of ranges, of at most `count`, whose longest has no more layers than with `count` ranges.
pub fn fewest_ranges(n_layers: usize, count: usize) -> usize {
    n_layers.div_ceil(n_layers.div_ceil(count.clamp(1, n_layers)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(text: &str, variables: &[(&str, &str)]) -> std::result::Result<(usize, usize), String> {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let share = parse_share_of(text)?;
        share.resolve("--shard", &variable).map_err(|e| e.to_string())
    }

    #[test]
    fn schedulers_number_the_tasks() {
        let slurm = |id, count, first, step| {
            [
                ("SLURM_ARRAY_TASK_ID", id),
                ("SLURM_ARRAY_TASK_COUNT", count),
                ("SLURM_ARRAY_TASK_MIN", first),
                ("SLURM_ARRAY_TASK_STEP", step),
            ]
        };
        assert_eq!(resolve("auto", &slurm("3", "8", "0", "1")), Ok((3, 8)));
        assert_eq!(resolve("auto", &slurm("1", "8", "1", "1")), Ok((0, 8)));
        assert_eq!(resolve("auto", &slurm("19", "5", "7", "4")), Ok((3, 5)));
        // An array with gaps does some tasks again.
        assert_eq!(resolve("auto/8", &slurm("5", "2", "3", "1")), Ok((5, 8)));
        assert_eq!(resolve("auto/4", &[("JOB_COMPLETION_INDEX", "3")]), Ok((3, 4)));
        // Nothing is read without `auto`.
        assert_eq!(resolve("1/2", &slurm("7", "8", "0", "1")), Ok((1, 2)));
        for (text, variables) in [
            ("auto", &[][..]),
            ("auto", &[("JOB_COMPLETION_INDEX", "3")]),
            ("auto/3", &[("JOB_COMPLETION_INDEX", "3")]),
            ("auto/3", &[("JOB_COMPLETION_INDEX", "-1")]),
            ("auto", &[("SLURM_ARRAY_TASK_ID", "3")]),
            ("auto", &slurm("8", "8", "0", "1")),
            ("auto", &slurm("9", "5", "7", "4")),
            ("auto", &slurm("0", "5", "7", "1")),
            ("auto", &slurm("x", "5", "7", "1")),
            ("2/2", &[]),
            ("0/0", &[]),
            ("-1/2", &[]),
            ("auto/0", &[]),
            ("1", &[]),
            ("", &[]),
        ] {
            assert!(resolve(text, variables).is_err(), "{text} {variables:?}");
        }
    }

    #[test]
    fn layers_are_divided_without_gaps() {
        for (n_layers, count) in [(30, 4), (32, 32), (126, 7), (5, 1)] {
            let mut next = 0;
            for index in 0..count {
                let share = parse_layers(&format!("{index}/{count}")).unwrap();
                let layers = share.resolve(n_layers, &|_| None).unwrap();
                assert_eq!(layers.start, next);
                assert!(layers.len() >= n_layers / count && layers.len() <= n_layers.div_ceil(count));
                next = layers.end;
            }
            assert_eq!(next, n_layers);
        }
        let of = |text: &str| parse_layers(text).map(|layers| layers.resolve(6, &|_| None).ok());
        assert_eq!(of("2..5"), Ok(Some(2..5)));
        assert_eq!(of("2..7"), Ok(None));
        assert_eq!(of("0/7"), Ok(None));
        for wrong in ["3..3", "4..2", "..2", "1..", "a..b", "0-3", "3"] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn layers_take_no_more_tasks_than_they_need() {
        for (n_layers, count, fewest) in [
            (32, 20, 16),
            (32, 32, 32),
            (32, 99, 32),
            (126, 100, 63),
            (5, 1, 1),
        ] {
            assert_eq!(fewest_ranges(n_layers, count), fewest);
            let longest = |count| layer_ranges(n_layers, count).iter().map(Range::len).max();
            assert_eq!(longest(fewest), longest(count.min(n_layers)));
        }
    }
}
