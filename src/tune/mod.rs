//! Tuning: which method, budget and row format serves each KV head, so that all together lose least within a limit.
//!
//! [`Sensitivities`] say how much a model's predictions change if some of its KV heads are served in another way and all
//! others by full attention. They are measured once. Small changes add up, so an [allocation](allocate()) over them predicts
//! what a whole plan loses, for any limit and without another measurement; `kvsmith tune` then measures the plan itself.
//! KVTuner (arXiv 2502.04420) allocates bits by the error of attention; here the unit is the divergence of the predictions,
//! and methods and budgets are choices as well.

mod allocate;
mod limit;
mod measure;
mod sensitivities;
mod times;

pub use allocate::{Allocation, Alternative, allocate};
pub use limit::{Limit, Quantity};
pub use measure::{Checked, PlanLoss, TuneSettings, Tuning, Uniform, usual_formats};
pub use sensitivities::{Candidate, Per, PlanFigures, Sensitivities, Tuned, Way};
pub use times::StepTimes;
