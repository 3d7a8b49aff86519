//! stub
use crate::artifact::Artifact;
use crate::error::Result;
/// .
pub const SECTION: &str = "lfps";
/// .
#[derive(Clone, Default)]
#[allow(missing_docs)]
pub struct HeadPrior {
    pub lambda: f32,
    pub glob_bias: f32,
    pub rho0: f32,
    pub gamma: f32,
    pub alpha: f32,
    pub p_bypass: [f32; 6],
}
#[allow(missing_docs)]
impl HeadPrior {
    pub fn slash_at(&self, _delta: usize) -> f32 {
        0.0
    }
    pub fn vert_at(&self, _position: usize) -> Option<f32> {
        None
    }
    pub fn bypass_rate(&self, _theta: f64) -> f32 {
        0.0
    }
}
/// .
pub struct Priors;
#[allow(missing_docs)]
impl Priors {
    pub fn load(_: &Artifact) -> Result<Self> {
        Ok(Self)
    }
    pub fn head(&self, _: usize, _: usize) -> &HeadPrior {
        unimplemented!()
    }
}
