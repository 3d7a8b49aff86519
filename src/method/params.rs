//! The parameters of all methods, as flags.

use clap::Command;

use super::a2ats::params::A2atsParams;
use super::ctkvr::params::CtkvrParams;
use super::doublesparsity::params::DoubleSparsityParams;
use super::lfps::params::LfpsParams;
use super::pqcache::params::PqCacheParams;
use super::quest::params::QuestParams;
use super::selfindex::params::SelfIndexParams;

/// The parameters of every method that has some.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(skip)]
pub struct MethodParams {
    /// See [`crate::method::a2ats`].
    #[command(flatten)]
    pub a2ats: A2atsParams,
    /// See [`crate::method::selfindex`].
    #[command(flatten)]
    pub selfindex: SelfIndexParams,
    /// See [`crate::method::lfps`].
    #[command(flatten)]
    pub lfps: LfpsParams,
    /// See [`crate::method::ctkvr`].
    #[command(flatten)]
    pub ctkvr: CtkvrParams,
    /// See [`crate::method::doublesparsity`].
    #[command(flatten)]
    pub doublesparsity: DoubleSparsityParams,
    /// See [`crate::method::quest`].
    #[command(flatten)]
    pub quest: QuestParams,
    /// See [`crate::method::pqcache`].
    #[command(flatten)]
    pub pqcache: PqCacheParams,
}

/// Lists the methods that have flags of their own, each with the names of its flags.
pub fn flags_of_methods() -> [(&'static str, Vec<String>); 7] {
    fn flags<P: clap::Args>() -> Vec<String> {
        let command = P::augment_args(Command::new("parameters"));
        let named = command.get_arguments().filter_map(|arg| arg.get_long());
        named.map(str::to_owned).collect()
    }
    [
        ("a2ats", flags::<A2atsParams>()),
        ("selfindex", flags::<SelfIndexParams>()),
        ("lfps", flags::<LfpsParams>()),
        ("ctkvr", flags::<CtkvrParams>()),
        ("doublesparsity", flags::<DoubleSparsityParams>()),
        ("quest", flags::<QuestParams>()),
        ("pqcache", flags::<PqCacheParams>()),
    ]
}
