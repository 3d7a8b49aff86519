//! The head plan that a verdict recommends.

use serde_json::{Map, Value};

use super::super::named::Named;
use super::{HeadPlan, Plan};
use crate::artifact::{Artifact, Judged, Verdict};
use crate::error::Result;
use crate::kv::{Budget, KvType};
use crate::model::Sizes;

impl Plan {
    /// Serves all KV heads with the method and the budget that a verdict recommends, in the formats (bf16 if unknown) and with the
    /// static set that it was measured with; `None` if it has no row that a run could take.
    ///
    /// # Errors
    /// This version does not know the method.
    pub fn recommended(verdict: &Verdict, sizes: Sizes) -> Result<Option<Self>> {
        let Some((row, measured)) = verdict.usual() else {
            return Ok(None);
        };
        let head = HeadPlan {
            method: Named::of_row(row)?,
            params: Map::new(),
            budget: Budget::Fraction(measured.budget),
            kv: KvType::named(&verdict.kv).unwrap_or(KvType::BF16),
        };
        Ok(Some(Self {
            sinks: verdict.sinks,
            window: verdict.window,
            ..Self::uniform(sizes, &head)
        }))
    }

    /// Reads the plan of an artifact unless it only repeats what the verdict recommends.
    ///
    /// # Errors
    /// As [`Plan::of_artifact`].
    pub fn given(artifact: &Artifact) -> Result<Option<Self>> {
        let plan = Self::of_artifact(artifact)?;
        let verdict = artifact.manifest.quality.methods.as_ref();
        // If this version does not know the recommended method, no plan that it can read repeats it.
        let recommended = verdict.and_then(|verdict| Self::recommended(verdict, artifact.sizes).ok()?);
        Ok(plan.filter(|plan| recommended.as_ref() != Some(plan)))
    }

    /// Returns a verdict with the head plan that an artifact gets with it: the plan that the artifact was
    /// [given](Plan::given), else what the verdict recommends.
    ///
    /// # Errors
    /// As [`Plan::of_artifact`].
    pub fn judged(artifact: &Artifact, verdict: Verdict) -> Result<Judged> {
        let plan = match Self::given(artifact)? {
            Some(given) => Some(given),
            None => Self::recommended(&verdict, artifact.sizes)?,
        };
        let head_plan: Option<Value> = plan.map(|plan| plan.json());
        Ok(Judged { verdict, head_plan })
    }
}
