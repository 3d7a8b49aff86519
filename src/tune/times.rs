//! The times of steps, as `bench decode` measured them.

use serde::Deserialize;
use serde_json::Value;

use super::sensitivities::Way;
use crate::error::{Error, Result};
use crate::kv::KvType;
use crate::method::named::Named;
use crate::method::registry::FULL;

/// Times of a model's steps on the CPU in which all KV heads are served alike, at one context.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTimes {
    rows: Vec<Row>,
}

#[derive(Clone, Debug, PartialEq)]
struct Row {
    method: Named,
    kv: KvType,
    budget: f64,
    ms: f64,
}

/// A row of the document; other keys are not read.
#[derive(Deserialize)]
struct Timed {
    method: String,
    kv: Option<String>,
    budget: Option<f64>,
    context: usize,
    batch: usize,
    median_s: f64,
    device: String,
    weight_bytes: usize,
}

impl StepTimes {
    /// Reads documents of `bench decode --json`. Rows of head plans, of several sequences, of budgets that are numbers of positions
    /// and of methods that this version does not know are left out.
    ///
    /// # Errors
    /// Another document; no row that counts; rows of several models or contexts.
    pub fn read(documents: &[Value]) -> Result<Self> {
        let wrong = |what: &str| {
            Error::invalid(what).hint(
                "give documents of `kvsmith bench decode` ⟨json⟩ on the CPU, with one context and a batch of 1",
            )
        };
        let rows_of = |document: &Value| {
            let rows = document["rows"].as_array();
            let rows = rows.filter(|_| document["command"] == "bench decode");
            rows.cloned()
                .ok_or_else(|| wrong("this is not a document of `bench decode`"))
        };
        let rows: Vec<Vec<Value>> = documents.iter().map(rows_of).collect::<Result<_>>()?;
        let mut settings = Vec::new();
        let mut found = Vec::new();
        for row in rows.iter().flatten() {
            let Ok(of) = Timed::deserialize(row) else {
                continue;
            };
            let (Some(method), Some(kv), Some(budget)) = (
                Named::parse(&of.method),
                of.kv.as_deref().and_then(KvType::named),
                of.budget,
            ) else {
                continue;
            };
            let is_time = of.median_s.is_finite() && of.median_s > 0.0;
            let is_share = budget > 0.0 && budget <= 1.0;
            if of.batch != 1 || of.device != "cpu" || !is_time || !is_share {
                continue;
            }
            // Models are told apart by the bytes of their weights.
            let setting = (of.context, of.weight_bytes);
            if !settings.contains(&setting) {
                settings.push(setting);
            }
            found.push(Row {
                method,
                kv,
                budget,
                ms: 1e3 * of.median_s,
            });
        }
        match settings.len() {
            0 => Err(wrong("no row has a method, a budget and a type of the cache")),
            1 => {
                found.sort_by(|a, b| a.budget.total_cmp(&b.budget));
                Ok(Self { rows: found })
            }
            _ => Err(wrong("the rows are of several models or contexts")),
        }
    }

    /// Returns the milliseconds of a step, by linear interpolation between two budgets; `None` if the method or the format was
    /// not timed, or only on one side of the budget.
    pub fn ms(&self, serving: &Way) -> Option<f64> {
        let of = |row: &&Row| row.method == serving.method && row.kv == serving.kv;
        let rows: Vec<&Row> = self.rows.iter().filter(of).collect();
        if serving.method.method == FULL {
            return rows.first().map(|row| row.ms);
        }
        let budget = serving.budget.value();
        let next = rows.iter().position(|row| row.budget >= budget)?;
        let upper = rows[next];
        if upper.budget == budget {
            return Some(upper.ms);
        }
        let lower = rows.get(next.checked_sub(1)?)?;
        let part = (budget - lower.budget) / (upper.budget - lower.budget);
        Some(lower.ms + part * (upper.ms - lower.ms))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kv::Budget;

    fn row(method: &str, budget: f64, kv: &str, ms: f64) -> Value {
        json!({"method": method, "budget": budget, "kv": kv, "context": 8192, "batch": 1, "median_s": ms / 1e3, "device": "cpu",
            "weight_bytes": 1000, "name": "x"})
    }

    #[test]
    fn times_between_two_budgets_are_interpolated() {
        let plan = json!({"method": "plan", "kv": null, "budget": null, "context": 4096, "batch": 1, "median_s": 1.0, "device": "cpu",
            "weight_bytes": 1000});
        let document = |rows: Vec<Value>| json!({"command": "bench decode", "rows": rows});
        let times = StepTimes::read(&[
            document(vec![row("wpq", 0.1, "bf16", 30.0), plan]),
            document(vec![
                row("wpq", 0.02, "bf16", 20.0),
                row("full", 0.02, "bf16", 50.0),
            ]),
        ])
        .unwrap();
        let ms = |method: &str, budget: f64, kv: KvType| {
            times.ms(&Way {
                method: Named::read(method).unwrap(),
                budget: Budget::Fraction(budget),
                kv,
            })
        };
        let near = |ms: Option<f64>, expected: f64| assert!((ms.unwrap() - expected).abs() < 1e-9);
        near(ms("wpq", 0.02, KvType::BF16), 20.0);
        near(ms("wpq", 0.1, KvType::BF16), 30.0);
        near(ms("wpq", 0.04, KvType::BF16), 22.5);
        near(ms("full", 1.0, KvType::BF16), 50.0);
        for (method, budget, kv) in [
            ("wpq", 0.01, KvType::BF16),
            ("wpq", 0.2, KvType::BF16),
            ("wpq", 0.04, KvType::F32),
            ("lfps", 0.04, KvType::BF16),
        ] {
            assert_eq!(ms(method, budget, kv), None, "{method} {budget}");
        }
    }

    #[test]
    fn other_documents_are_refused() {
        let mut other = row("wpq", 0.1, "bf16", 30.0);
        other["context"] = json!(4096);
        for (document, says) in [
            (
                json!({"command": "eval", "rows": []}),
                "not a document of `bench decode`",
            ),
            (json!([]), "not a document of `bench decode`"),
            (
                json!({"command": "bench decode", "rows": [{"method": "wpq"}]}),
                "no row has",
            ),
            (
                json!({"command": "bench decode", "rows": [row("wpq", 0.1, "bf16", 30.0), other]}),
                "several models or contexts",
            ),
        ] {
            let said = StepTimes::read(&[document]).unwrap_err().to_string();
            assert!(said.contains(says), "{said}");
        }
    }
}
