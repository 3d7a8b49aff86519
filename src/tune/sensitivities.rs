//! How much the predictions change if some KV heads are served in another way, and the plans that follow from it.

use serde::{Deserialize, Serialize};

use super::allocate::{Alternative, allocate};
use super::limit::{Limit, Quantity};
use super::times::StepTimes;
use crate::error::{Error, Result};
use crate::kv::{Budget, KvType};
use crate::method::named::Named;
use crate::method::plan::{HeadPlan, Plan};
use crate::model::Sizes;
use crate::parameters::choices;
use crate::runner::eval::Unit;

choices! {
    /// Which KV heads are served alike.
    pub enum Per {
        /// Each KV head has a choice of its own.
        Head = "head",
        /// The KV heads of a layer have one choice.
        Layer = "layer",
    }
}

/// Most KV heads of a model that are read: more than any model has.
const MOST_HEADS: usize = 1 << 20;

/// A way to serve KV heads.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Way {
    /// The method.
    pub method: Named,
    /// How many positions a step may choose.
    pub budget: Budget,
    /// The formats of keys and values.
    pub kv: KvType,
}

/// A way to serve KV heads that a plan may choose.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Candidate {
    /// The way.
    pub serving: Way,
    /// The measured ways whose divergences add up to its own: itself, or the choice of positions and the format of rows apart.
    pub parts: Vec<usize>,
    /// Per layer, if all its KV heads are served in this way: what memory moves in a step, as a share of all visible rows of
    /// the model in bf16.
    pub bytes: Vec<f64>,
    /// Per layer: what rows and indexes take, as a share of all rows of the model in bf16.
    pub memory: Vec<f64>,
}

/// What was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sensitivities {
    /// Fingerprint of the model.
    pub model: String,
    /// Whether the texts are no part of the artifact's calibration text: what was fitted to them is then not known.
    pub other_text: bool,
    /// Sizes of the model.
    pub sizes: Sizes,
    /// Tokens of the longest text.
    pub length: usize,
    /// Number of texts.
    pub blocks: usize,
    /// Decode steps of all texts.
    pub steps: usize,
    /// First positions that every step attends.
    pub sinks: usize,
    /// Last positions that every step attends.
    pub window: usize,
    /// What has a choice of its own.
    pub per: Per,
    /// The ways that were measured.
    pub ways: Vec<Way>,
    /// For each unit, layer by layer, and each of these ways: the mean KL divergence, in nats, if this unit is served in this
    /// way and all others by full attention.
    pub kl: Vec<Vec<f64>>,
    /// What a plan may choose from.
    pub candidates: Vec<Candidate>,
}

/// A plan with what is expected of it.
#[derive(Clone, Debug)]
pub struct Tuned {
    /// The plan.
    pub plan: Plan,
    /// What is to be small.
    pub least: Quantity,
    /// What is expected of the plan.
    pub expected: PlanFigures,
    /// No plan of the same candidates within the limit is expected to have less of what is to be small.
    pub bound: f64,
    /// The plans that serve all KV heads alike within the limit, the one that should be best first.
    pub uniform: Vec<(Way, PlanFigures)>,
}

/// What is expected of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PlanFigures {
    /// The sum of its units' divergences, in nats.
    pub kl: f64,
    /// As of [`Quantity::Bytes`].
    pub bytes: f64,
    /// As of [`Quantity::Memory`].
    pub memory: f64,
    /// As of [`Quantity::Ms`]; `None` without times.
    pub ms: Option<f64>,
}

impl PlanFigures {
    /// Returns a quantity; infinite if it is not known.
    pub fn get(&self, of: Quantity) -> f64 {
        match of {
            Quantity::Kl => self.kl,
            Quantity::Bytes => self.bytes,
            Quantity::Memory => self.memory,
            Quantity::Ms => self.ms.unwrap_or(f64::INFINITY),
        }
    }

    /// Adds those of several units.
    fn sum(all: impl Iterator<Item = Self>) -> Self {
        let none = Self {
            kl: 0.0,
            bytes: 0.0,
            memory: 0.0,
            ms: Some(0.0),
        };
        all.fold(none, |sum, of| Self {
            kl: sum.kl + of.kl,
            bytes: sum.bytes + of.bytes,
            memory: sum.memory + of.memory,
            ms: sum.ms.zip(of.ms).map(|(sum, of)| sum + of),
        })
    }
}

impl Way {
    /// Returns the plan of a KV head that is served in this way.
    pub fn head_plan(&self) -> HeadPlan {
        HeadPlan {
            method: self.method,
            params: serde_json::Map::new(),
            budget: self.budget,
            kv: self.kv,
        }
    }
}

/// Lists what has a choice of its own in a model of these sizes, layer by layer.
pub fn units(per: Per, sizes: Sizes) -> Vec<Unit> {
    let at_once = match per {
        Per::Head => 1,
        Per::Layer => sizes.n_kv_heads,
    };
    let of_layer = |layer: usize| {
        let firsts = (0..sizes.n_kv_heads).step_by(at_once);
        firsts.map(move |first| Unit {
            layer,
            heads: first..first + at_once,
        })
    };
    (0..sizes.n_layers).flat_map(of_layer).collect()
}

impl Sensitivities {
    /// Reads what [`Serialize`] wrote.
    ///
    /// # Errors
    /// A value of another form; lists that do not fit each other; numbers that are no shares or divergences.
    pub fn read(value: serde_json::Value) -> Result<Self> {
        let damaged = |what: String| {
            Error::invalid(format!("the sensitivities are invalid: {what}"))
                .hint("give a file that `kvsmith tune` wrote")
        };
        let own: Self = serde_json::from_value(value).map_err(|e| damaged(e.to_string()))?;
        own.sizes.check()?;
        let heads = own.sizes.n_layers.saturating_mul(own.sizes.n_kv_heads);
        if heads > MOST_HEADS || own.window == 0 || own.candidates.is_empty() {
            return Err(damaged(format!(
                "{heads} KV heads, a window of {}, {} candidates",
                own.window,
                own.candidates.len()
            )));
        }
        let per_layer = match own.per {
            Per::Head => own.sizes.n_kv_heads,
            Per::Layer => 1,
        };
        let is_number = |x: &f64| x.is_finite() && *x >= 0.0;
        let of_layers = |of: &Vec<f64>| of.len() == own.sizes.n_layers && of.iter().all(is_number);
        let fits = |of: &Candidate| {
            of_layers(&of.bytes)
                && of_layers(&of.memory)
                && of.parts.iter().all(|part| *part < own.ways.len())
        };
        if own.sizes.n_layers.checked_mul(per_layer) != Some(own.kl.len()) {
            return Err(damaged(format!("{} rows of `kl`", own.kl.len())));
        }
        if let Some(row) = own
            .kl
            .iter()
            .position(|row| row.len() != own.ways.len() || !row.iter().all(is_number))
        {
            return Err(damaged(format!("row {row} of `kl`")));
        }
        match own.candidates.iter().position(|of| !fits(of)) {
            Some(at) => Err(damaged(format!("item {at} of `candidates`"))),
            None => Ok(own),
        }
    }

    /// Returns what is expected of a unit that is served as a candidate says.
    fn expected(
        &self,
        (index, unit): (usize, &Unit),
        of: &Candidate,
        times: Option<&StepTimes>,
    ) -> PlanFigures {
        let part = unit.heads.len() as f64 / self.sizes.n_kv_heads as f64;
        PlanFigures {
            kl: of.parts.iter().map(|way| self.kl[index][*way]).sum(),
            bytes: part * of.bytes[unit.layer],
            memory: part * of.memory[unit.layer],
            // A step in which all KV heads are served alike was timed: each head has its part of everything.
            ms: times
                .and_then(|times| times.ms(&of.serving))
                .map(|ms| ms * part / self.sizes.n_layers as f64),
        }
    }

    /// Finds the plan that is expected to have the least of `least` within a limit.
    ///
    /// # Errors
    /// A limit, or a quantity that is to be small, in milliseconds, without times of any candidate; no plan is within the limit.
    pub fn tune(&self, limit: Limit, least: Quantity, times: Option<&StepTimes>) -> Result<Tuned> {
        let is_timed = |of: &&Candidate| times.is_some_and(|times| times.ms(&of.serving).is_some());
        let needs_times = [limit.of, least].contains(&Quantity::Ms);
        let candidates: Vec<&Candidate> = self
            .candidates
            .iter()
            .filter(|of| !needs_times || is_timed(of))
            .collect();
        if candidates.is_empty() {
            return Err(
                Error::invalid("nothing that a plan may choose was timed").hint(format!(
                    "give ⟨times⟩ documents of `kvsmith bench decode` ⟨json⟩ at one context, with the methods, budgets and types of the cache that are to be chosen from: {}",
                    self.listed()
                )),
            );
        }
        let units = units(self.per, self.sizes);
        let of_unit = |unit: (usize, &Unit)| -> Vec<PlanFigures> {
            candidates
                .iter()
                .map(|of| self.expected(unit, of, times))
                .collect()
        };
        let expected: Vec<Vec<PlanFigures>> = units.iter().enumerate().map(of_unit).collect();
        let choice = |of: &PlanFigures| Alternative {
            cost: of.get(limit.of),
            loss: of.get(least),
        };
        let choices: Vec<Vec<Alternative>> = expected
            .iter()
            .map(|of| of.iter().map(choice).collect())
            .collect();
        let found = allocate(&choices, limit.most).ok_or_else(|| {
            let least = |unit: &Vec<Alternative>| unit.iter().map(|of| of.cost).fold(f64::INFINITY, f64::min);
            let smallest: f64 = choices.iter().map(least).sum();
            Error::invalid(format!("no plan of these choices is within {limit}")).hint(format!(
                "the least that is possible is {}={smallest:.3e}; raise the limit, or measure with other ⟨budgets⟩, ⟨kv⟩ or ⟨methods⟩",
                limit.of
            ))
        })?;
        let sizes = self.sizes;
        let any = candidates[0].serving.head_plan();
        let mut layers = vec![vec![any; sizes.n_kv_heads]; sizes.n_layers];
        for (unit, pick) in units.iter().zip(&found.picks) {
            layers[unit.layer][unit.heads.clone()].fill(candidates[*pick].serving.head_plan());
        }
        let mut uniform: Vec<(Way, PlanFigures)> = candidates
            .iter()
            .enumerate()
            .map(|(at, of)| (of.serving, PlanFigures::sum(expected.iter().map(|unit| unit[at]))))
            .filter(|(_, sum)| sum.get(limit.of) <= limit.most)
            .collect();
        uniform.sort_by(|(_, a), (_, b)| a.get(least).total_cmp(&b.get(least)));
        Ok(Tuned {
            plan: Plan {
                sinks: self.sinks,
                window: self.window,
                layers,
            },
            least,
            expected: PlanFigures::sum(expected.iter().zip(&found.picks).map(|(unit, pick)| unit[*pick])),
            bound: found.bound,
            uniform,
        })
    }

    /// Names the methods, budgets and formats of the candidates.
    fn listed(&self) -> String {
        let mut named: Vec<String> = Vec::new();
        for of in &self.candidates {
            let text = format!("{} over {}", of.serving.method, of.serving.kv);
            if !named.contains(&text) {
                named.push(text);
            }
        }
        named.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Two layers of two KV heads: the second head of the first layer needs everything, all others hardly anything.
    fn measured() -> Sensitivities {
        let serving = |method: &str, budget: f64, kv: KvType| Way {
            method: Named::read(method).unwrap(),
            budget: Budget::Fraction(budget),
            kv,
        };
        let int4 = KvType::named("int4").unwrap();
        let ways = vec![
            serving("wpq", 0.05, KvType::BF16),
            serving("wpq", 0.2, KvType::BF16),
            serving("full", 1.0, int4),
        ];
        let candidate = |serving, parts: &[usize], bytes: f64, memory: f64| Candidate {
            serving,
            parts: parts.to_vec(),
            bytes: vec![bytes / 2.0; 2],
            memory: vec![memory / 2.0; 2],
        };
        Sensitivities {
            model: "0".repeat(64),
            other_text: false,
            sizes: Sizes {
                n_layers: 2,
                n_heads: 4,
                n_kv_heads: 2,
                head_dim: 16,
            },
            length: 1000,
            blocks: 2,
            steps: 32,
            sinks: 4,
            window: 64,
            per: Per::Head,
            ways: ways.clone(),
            kl: vec![
                vec![0.001, 0.0005, 0.002],
                vec![0.5, 0.3, 0.01],
                vec![0.002, 0.001, 0.003],
                vec![0.001, 0.0009, 0.002],
            ],
            candidates: vec![
                candidate(serving("full", 1.0, KvType::BF16), &[], 1.0, 1.0),
                candidate(serving("full", 1.0, int4), &[2], 0.28, 0.28),
                candidate(ways[0], &[0], 0.08, 1.02),
                candidate(ways[1], &[1], 0.22, 1.02),
                candidate(serving("wpq", 0.05, int4), &[0, 2], 0.04, 0.3),
            ],
        }
    }

    fn limit(text: &str) -> Limit {
        text.parse().unwrap()
    }

    /// The best of all plans, by trying each.
    fn best(of: &Sensitivities, limit: Limit, least: Quantity) -> Option<f64> {
        let units = units(of.per, of.sizes);
        let n = of.candidates.len();
        let plans = (0..n.pow(4)).map(|mut code| {
            PlanFigures::sum(units.iter().enumerate().map(|unit| {
                let pick = code % n;
                code /= n;
                of.expected(unit, &of.candidates[pick], None)
            }))
        });
        let within = plans.filter(|plan| plan.get(limit.of) <= limit.most);
        within.map(|plan| plan.get(least)).min_by(f64::total_cmp)
    }

    #[test]
    fn brute_force_agrees() {
        let of = measured();
        for text in [
            "bytes=0.05",
            "bytes=0.1",
            "bytes=0.3",
            "memory=0.3",
            "memory=0.5",
            "bytes=0.04",
            "memory=2",
        ] {
            let limit = limit(text);
            let tuned = of.tune(limit, Quantity::Kl, None).unwrap();
            let best = best(&of, limit, Quantity::Kl).unwrap();
            assert!((tuned.expected.kl - best).abs() < 1e-12, "{text}");
            assert!(tuned.expected.get(limit.of) <= limit.most && tuned.bound <= tuned.expected.kl);
        }
        for (text, least) in [("kl=0.01", Quantity::Bytes), ("kl=0.02", Quantity::Memory)] {
            let limit = limit(text);
            let tuned = of.tune(limit, least, None).unwrap();
            let best = best(&of, limit, least).unwrap();
            assert!((tuned.expected.get(least) - best).abs() < 1e-12, "{text}");
            assert!(tuned.expected.kl <= limit.most);
        }
    }

    #[test]
    fn a_head_that_needs_everything_gets_it() {
        let of = measured();
        let tuned = of.tune(limit("bytes=0.35"), Quantity::Kl, None).unwrap();
        let served = |layer: usize, kv_head: usize| tuned.plan.layers[layer][kv_head].to_string();
        assert_eq!(served(0, 1), "full, budget 1, bf16 cache");
        assert_eq!(served(0, 0), "wpq, budget 0.05, bf16 cache");
        // Of the plans that serve all alike, the best comes first.
        let (serving, sum) = tuned.uniform[0];
        assert_eq!(serving.head_plan().to_string(), "full, budget 1, int4 cache");
        assert!((sum.kl - 0.017).abs() < 1e-12 && sum.kl > tuned.expected.kl);
        // Layers as a whole: each has one choice.
        let layers = Sensitivities {
            per: Per::Layer,
            kl: vec![vec![0.501, 0.3005, 0.012], vec![0.003, 0.0019, 0.005]],
            ..measured()
        };
        let tuned = layers.tune(limit("bytes=0.2"), Quantity::Kl, None).unwrap();
        for heads in &tuned.plan.layers {
            assert_eq!(heads[0], heads[1]);
        }
        assert!((tuned.expected.bytes - 0.18).abs() < 1e-12);
    }

    #[test]
    fn a_limit_that_nothing_meets_is_an_error() {
        let of = measured();
        let error = of.tune(limit("bytes=0.01"), Quantity::Kl, None).unwrap_err();
        assert_eq!(error.to_string(), "no plan of these choices is within bytes=0.01");
        assert!(error.advice().unwrap().contains("bytes=4.000e-2"));
        let error = of.tune(limit("ms=10"), Quantity::Kl, None).unwrap_err();
        assert!(error.advice().unwrap().contains("wpq over int4"));
    }

    #[test]
    fn what_was_written_is_read_and_what_does_not_fit_is_not() {
        let of = measured();
        let value = serde_json::to_value(&of).unwrap();
        assert_eq!(Sensitivities::read(value.clone()).unwrap(), of);
        type Damage = fn(&mut Value);
        let damages: [(&str, Damage); 6] = [
            ("rows of `kl`", |v| drop(v["kl"].as_array_mut().unwrap().pop())),
            ("row 1 of `kl`", |v| v["kl"][1][0] = json!(-1.0)),
            ("row 2 of `kl`", |v| v["kl"][2] = json!([])),
            ("item 3 of `candidates`", |v| {
                v["candidates"][3]["parts"] = json!([9])
            }),
            ("item 0 of `candidates`", |v| {
                v["candidates"][0]["bytes"] = json!([1.0])
            }),
            ("unknown field", |v| v["more"] = json!(1)),
        ];
        for (says, damage) in damages {
            let mut wrong = value.clone();
            damage(&mut wrong);
            let said = Sensitivities::read(wrong).unwrap_err().to_string();
            assert!(said.contains(says), "{said}");
        }
        let mut huge = value;
        huge["sizes"]["n_layers"] = json!(1_u64 << 30);
        assert!(Sensitivities::read(huge).is_err());
    }
}
