//! The flags of a plan in shards.

use crate::cmd::flags::at_least_one;

/// Flags of `plan` for a calibration in shards.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
#[command(next_help_heading = "Shards")]
pub struct ShardFlags {
    /// Also plan this calibration as two job arrays on a cluster: with N token shards, or with the smallest number that
    /// fits --task-memory and meets --deadline (auto, as without a number)
    #[arg(long, value_name = "N|auto", value_parser = parse_shards, num_args = 0..=1, default_missing_value = "auto")]
    pub shards: Option<Wanted>,
    /// Time in which the whole calibration should be done: both job arrays and the join, such as 90min, 8h or 2d
    #[arg(long, value_name = "TIME", default_value = "8h", value_parser = parse_time, requires = "shards")]
    pub deadline: f64,
    /// Number of tasks that the cluster runs at the same time (default: all tasks of a job array)
    #[arg(long, value_name = "N", value_parser = at_least_one, requires = "shards")]
    pub tasks_at_once: Option<usize>,
    /// Memory of the machine of each task, such as 64GB (default: the free memory of this machine)
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "shards")]
    pub task_memory: Option<usize>,
    /// Gigabytes per second that the shared disk reads or writes for all tasks together
    #[arg(long, value_name = "GB/S", default_value = "1", value_parser = parse_rate, requires = "shards")]
    pub shared_bandwidth: f64,
}

/// The number of token shards that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The smallest that meets the deadline.
    Auto,
    /// This many.
    Count(usize),
}

/// Parses a number of shards, or `auto`.
fn parse_shards(text: &str) -> Result<Wanted, String> {
    match text.trim() {
        "auto" => Ok(Wanted::Auto),
        text => at_least_one(text)
            .map(Wanted::Count)
            .map_err(|e| format!("{e}, or `auto`")),
    }
}

/// Parses a positive number with one of these units, and returns it in the smallest unit.
fn with_unit(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let text = text.trim();
    let end = text.find(|c: char| c.is_ascii_alphabetic())?;
    let number: f64 = text[..end].trim().parse().ok()?;
    let (_, scale) = units
        .iter()
        .find(|(unit, _)| unit.eq_ignore_ascii_case(&text[end..]))?;
    Some(number * scale).filter(|x| x.is_finite() && *x > 0.0)
}

/// Parses a time and returns its seconds.
fn parse_time(text: &str) -> Result<f64, String> {
    let units = [
        ("s", 1.0),
        ("m", 60.0),
        ("min", 60.0),
        ("h", 3600.0),
        ("d", 86400.0),
    ];
    with_unit(text, &units)
        .ok_or_else(|| "expected a number with a unit: s, min, h or d, such as 8h".to_owned())
}

/// Parses an amount of memory and returns its bytes.
fn parse_size(text: &str) -> Result<usize, String> {
    let units = [
        ("MB", 1e6),
        ("GB", 1e9),
        ("TB", 1e12),
        ("MiB", (1u64 << 20) as f64),
        ("GiB", (1u64 << 30) as f64),
        ("TiB", (1u64 << 40) as f64),
    ];
    let bytes = with_unit(text, &units).filter(|bytes| *bytes < isize::MAX as f64);
    let expected =
        || "expected a number with a unit: MB, GB or TB, or MiB, GiB or TiB, such as 64GB".to_owned();
    bytes.map(|bytes| bytes as usize).ok_or_else(expected)
}

/// Parses gigabytes per second and returns bytes per second.
fn parse_rate(text: &str) -> Result<f64, String> {
    let number = text.trim().parse::<f64>().ok().map(|rate| 1e9 * rate);
    let number = number.filter(|rate| rate.is_finite() && *rate > 0.0);
    number.ok_or_else(|| "expected a number of gigabytes per second above 0, such as 2.5".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_units() {
        assert_eq!(parse_time("8h"), Ok(28_800.0));
        assert_eq!(parse_time(" 1.5 d"), Ok(129_600.0));
        assert_eq!(parse_time("90min"), parse_time("90m"));
        assert_eq!(parse_size("64GB"), Ok(64_000_000_000));
        assert_eq!(parse_size("0.5 gib"), Ok(1 << 29));
        assert_eq!(parse_rate("2.5"), Ok(2.5e9));
        assert_eq!(parse_shards("auto"), Ok(Wanted::Auto));
        assert_eq!(parse_shards("16"), Ok(Wanted::Count(16)));
        for wrong in ["8", "h", "-1h", "0h", "8 weeks", "infd", "", "1h30"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
        for wrong in ["64", "64G", "-1GB", "1e30TB", "GB"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
        for wrong in ["0", "-1", "1GB", "inf", "nan"] {
            assert!(parse_rate(wrong).is_err(), "{wrong}");
        }
        for wrong in ["0", "-1", "many", "1.5"] {
            assert!(parse_shards(wrong).is_err(), "{wrong}");
        }
    }
}
