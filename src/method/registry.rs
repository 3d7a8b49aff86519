//! The methods by name. A new method needs one line in [`METHODS`].

use std::fmt;

use serde_json::{Map, Value};

use super::bench::{Bench, BenchParams};
use super::declaration::{Ask, Declaration, InVerdict};
use super::per_head::PerHead;
use super::{
    Alike, Method, a2ats, ctkvr, doublesparsity, full, h2o, lfps, pqcache, quest, random, randsign,
    selfindex, snapkv, streaming, topk, triattention, wpq,
};
use crate::artifact::Artifact;
use crate::error::Result;

/// All methods, in the order of the help. The default is the first method whose section the artifact has.
pub static METHODS: &[MethodName] = &[
    MethodName(&full::METHOD),
    MethodName(&topk::METHOD),
    MethodName(&random::METHOD),
    MethodName(&streaming::METHOD),
    MethodName(&quest::METHOD),
    MethodName(&pqcache::METHOD),
    MethodName(&randsign::METHOD),
    MethodName(&snapkv::METHOD),
    MethodName(&h2o::METHOD),
    MethodName(&a2ats::METHOD),
    MethodName(&selfindex::METHOD),
    MethodName(&lfps::METHOD),
    MethodName(&ctkvr::METHOD),
    MethodName(&wpq::METHOD),
    MethodName(&doublesparsity::METHOD),
    MethodName(&triattention::METHOD),
];

/// Full attention, which also serves the steps and heads in which a method does not choose.
pub static FULL: MethodName = MethodName(&full::METHOD);

/// Returns full attention as a method that is prepared from nothing.
pub fn exact() -> &'static dyn Method {
    &Alike(full::Full)
}

/// The window and the first positions, which need no index.
pub static STREAMING: MethodName = MethodName(&streaming::METHOD);

/// One of [`METHODS`], named as on the command line.
#[derive(Clone, Copy)]
pub struct MethodName(&'static Declaration);

impl MethodName {
    /// Returns the method's name on the command line and in results.
    pub fn as_str(self) -> &'static str {
        self.0.name
    }

    /// Returns the method of this name; `None` for other text.
    pub fn named(name: &str) -> Option<Self> {
        METHODS.iter().copied().find(|method| method.as_str() == name)
    }

    /// Returns one line of help, with the paper.
    pub fn help(self) -> &'static str {
        self.0.help
    }

    /// Returns whether an artifact has the method's section.
    pub fn is_calibrated(self, artifact: &Artifact) -> bool {
        self.section(Some(artifact)).is_some()
    }

    /// Tells whether there is a section for the method.
    pub fn reads_section(self) -> bool {
        self.0.section.is_some()
    }

    /// Returns when a verdict measures the method.
    pub fn verdict(self) -> InVerdict {
        self.0.verdict
    }

    /// Returns how the method is benchmarked on random data, if it is.
    pub fn bench(self) -> Option<&'static dyn Bench> {
        self.0.bench
    }

    /// Prepares the method for a model. Full attention takes its place in every head that its section of the artifact
    /// marks as constant.
    ///
    /// # Errors
    /// The artifact is for a model of other sizes; something that the method needs is missing.
    pub fn prepare(self, ask: &Ask) -> Result<Box<dyn Method>> {
        ask.params.check()?;
        if let Some(artifact) = ask.artifact {
            artifact.check_sizes(ask.sizes)?;
        }
        let method = (self.0.prepare)(ask)?;
        let constant = match self.section(ask.artifact) {
            Some((artifact, name)) => artifact.section(name)?.constant_heads(),
            None => Vec::new(),
        };
        if constant.is_empty() {
            return Ok(method);
        }
        let index = |layer: usize, kv_head: usize| usize::from(constant.contains(&(layer, kv_head)));
        let of_layer = |layer| (0..ask.sizes.n_kv_heads).map(|c| index(layer, c)).collect();
        Ok(Box::new(PerHead {
            methods: vec![method, (FULL.0.prepare)(ask)?],
            indices: (0..ask.sizes.n_layers).map(of_layer).collect(),
            own: None,
            constant,
        }))
    }

    /// Returns the artifact and the name of the method's section, if the artifact has that section.
    pub fn section(self, artifact: Option<&Artifact>) -> Option<(&Artifact, &'static str)> {
        let named = artifact.zip(self.0.section);
        named.filter(|(artifact, section)| artifact.has(section))
    }
}

impl PartialEq for MethodName {
    fn eq(&self, other: &Self) -> bool {
        self.0.name == other.0.name
    }
}

impl Eq for MethodName {}

impl fmt::Debug for MethodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name)
    }
}

/// Counts the methods that read one of these sections.
pub fn readers<'s>(sections: impl Iterator<Item = &'s str>) -> usize {
    let reads = |section: &str| METHODS.iter().any(|method| method.0.section == Some(section));
    sections.filter(|section| reads(section)).count()
}

/// Lists the methods that a verdict measures although they have no section.
pub fn always_measured() -> impl Iterator<Item = MethodName> {
    let all = METHODS.iter().copied();
    all.filter(|method| method.verdict() != InVerdict::IfCalibrated)
}

/// Returns the method that ranks by exact scores, a bound for the others.
pub fn oracle() -> MethodName {
    only(InVerdict::Oracle)
}

/// Returns the method that chooses nothing besides the static set and the last positions.
pub fn plain_window() -> MethodName {
    only(InVerdict::Plain)
}

fn only(verdict: InVerdict) -> MethodName {
    let mut found = METHODS.iter().filter(|method| method.verdict() == verdict);
    found.next().copied().unwrap_or(FULL)
}

/// Returns the benchmarks on random data, in the order of [`METHODS`].
pub fn benches() -> impl Iterator<Item = &'static dyn Bench> {
    METHODS.iter().filter_map(|method| method.bench())
}

/// Checks parameters of random indexes, by their names.
///
/// # Errors
/// A name or a value that no method declares.
pub fn bench_params(values: Map<String, Value>) -> Result<BenchParams> {
    BenchParams::among(benches().map(Bench::parameters), values)
}

/// Returns the parameters with which random indexes have the sizes of an artifact's: those of each method whose section it has,
/// and the defaults of the others.
///
/// # Errors
/// A value in the artifact that its method does not declare.
pub fn bench_params_like(artifact: &Artifact) -> Result<BenchParams> {
    bench_params(
        benches()
            .flat_map(|bench| bench.parameters_of(artifact))
            .collect(),
    )
}

/// The method that a run takes first.
const OWN: &str = "wpq";

/// Returns the default method: our own if the artifact has its section, then the first one whose section it has, else full
/// attention.
pub fn default_method(artifact: Option<&Artifact>) -> MethodName {
    let own = METHODS.iter().filter(|method| method.as_str() == OWN);
    let calibrated = own
        .chain(METHODS)
        .find(|method| method.section(artifact).is_some());
    calibrated.copied().unwrap_or(FULL)
}

/// Returns the bytes that `method` needs whatever the context: those of its artifact section.
pub fn constant_bytes(method: MethodName, artifact: Option<&Artifact>) -> Result<usize> {
    let section = method.section(artifact);
    section.map_or(Ok(0), |(artifact, name)| Ok(artifact.section(name)?.bytes()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn parameters_of_benchmarks_are_told_apart_by_their_names() {
        let sets = benches().map(Bench::parameters);
        let mut names: Vec<&str> = sets.flat_map(|set| set.parameters).map(|p| p.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        let read = |value: Value| match value {
            Value::Object(values) => bench_params(values),
            _ => unreachable!("an object"),
        };
        assert!(read(json!({"size": 64, "lfps_rows": 8})).is_ok());
        for (wrong, says) in [
            (json!({"size": 0}), "`size` is 0"),
            (json!({"page": 16}), "there is no parameter `page`"),
        ] {
            assert_eq!(read(wrong).unwrap_err().to_string(), says);
        }
    }

    #[test]
    fn methods_that_every_verdict_measures() {
        let names: Vec<&str> = always_measured().map(MethodName::as_str).collect();
        assert_eq!(names, ["topk", "streaming", "ctkvr"]);
        assert_eq!(
            (oracle().as_str(), plain_window().as_str()),
            ("topk", "streaming")
        );
    }

    #[test]
    fn every_name_is_found_and_stands_once() {
        for (i, method) in METHODS.iter().enumerate() {
            let found = MethodName::named(method.as_str()).unwrap();
            let first = METHODS.iter().position(|m| *m == found);
            assert_eq!(first, Some(i), "{}", method.as_str());
        }
        assert!(MethodName::named("h20").is_none());
        assert_eq!(default_method(None).as_str(), "full");
    }
}
