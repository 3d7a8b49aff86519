//! What a run may set, over all methods.

use super::a2ats::params as a2ats;
use super::ctkvr::params as ctkvr;
use super::lfps::params as lfps;
use super::selfindex::params as selfindex;

/// The parameters of the methods that have some.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(skip)]
pub struct Params {
    /// See [`crate::method::a2ats`].
    #[command(flatten)]
    pub a2ats: a2ats::Params,
    /// See [`crate::method::selfindex`].
    #[command(flatten)]
    pub selfindex: selfindex::Params,
    /// See [`crate::method::lfps`].
    #[command(flatten)]
    pub lfps: lfps::Params,
    /// See [`crate::method::ctkvr`].
    #[command(flatten)]
    pub ctkvr: ctkvr::Params,
}
