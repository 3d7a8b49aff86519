//! The parameters of all methods, as flags.

use super::a2ats::params::A2atsParams;
use super::ctkvr::params::CtkvrParams;
use super::lfps::params::LfpsParams;
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
}
