//! The sections of a calibration: which are made, with which parameters, and the fit of one layer of one.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::artifact::{Fit, FitInput, LayerPart, LayerStates, SectionKind};
use crate::env::Progress;
use crate::error::{Error, Result};
use crate::method::a2ats;
use crate::method::sections::SECTIONS;

/// The sections to make, with the parameters of their fits.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SectionChoice {
    /// The names of the sections; `None` = all that are not made on request only.
    pub named: Option<Vec<String>>,
    /// Whether the sections that are made on request are made too.
    pub peers: bool,
    /// The parameters of the fits by the names of the sections; absent ones have their defaults.
    pub parameters: BTreeMap<String, Map<String, Value>>,
}

impl SectionChoice {
    /// Returns the parameters of a section's fit.
    fn parameters_for(&self, kind: &dyn SectionKind) -> Map<String, Value> {
        self.parameters.get(kind.name()).cloned().unwrap_or_default()
    }

    fn is_wanted(&self, kind: &dyn SectionKind) -> bool {
        let facts = kind.facts();
        let is_asked = match &self.named {
            _ if facts.on_request && self.peers => true,
            Some(named) => named.iter().any(|name| name == facts.name),
            None => !facts.on_request,
        };
        let values = self.parameters_for(kind);
        let is_null = |name| values.get(name).is_some_and(Value::is_null);
        is_asked && !kind.left_out_by().is_some_and(is_null)
    }

    /// Prepares the fit of every section that is wanted.
    ///
    /// # Errors
    /// A section that is not known, none at all, parameters out of range, too little text.
    pub fn fits(&self, input: &FitInput) -> Result<Vec<Box<dyn Fit>>> {
        let known = |name: &String| SECTIONS.iter().any(|kind| kind.name() == name);
        let named = self.named.iter().flatten().chain(self.parameters.keys());
        if let Some(name) = named.into_iter().find(|name| !known(name)) {
            let names: Vec<&str> = SECTIONS.iter().map(|kind| kind.name()).collect();
            let error = Error::usage(format!("there is no section `{name}`"));
            return Err(error.hint(format!("the sections are {}", names.join(", "))));
        }
        for kind in SECTIONS {
            kind.parameters().check(&self.parameters_for(*kind))?;
        }
        let wanted = SECTIONS.iter().filter(|kind| self.is_wanted(**kind));
        let fits: Vec<Box<dyn Fit>> = wanted
            .map(|kind| kind.fit(self.parameters_for(*kind), input))
            .collect::<Result<_>>()?;
        if fits.is_empty() {
            let left_out = SECTIONS.iter().filter_map(|kind| kind.left_out_by());
            let settings: Vec<String> = left_out.map(|name| format!("⟨{name}=none⟩")).collect();
            let settings = settings.join(", ");
            Err(
                Error::usage(format!("⟨sections⟩ and {settings} leave no section to make")).hint(format!(
                    "name another section with ⟨sections⟩, or omit {settings}"
                )),
            )
        } else {
            Ok(fits)
        }
    }

    /// Returns the number of codewords of a codebook, if it is set.
    pub fn codewords(&self) -> Option<usize> {
        let size = self.parameters.get(a2ats::SECTION)?.get(a2ats::SIZE)?;
        size.as_u64().map(|size| size as usize)
    }

    /// Sets the number of codewords of a codebook.
    #[must_use]
    pub fn with_codewords(mut self, codewords: usize) -> Self {
        let own = self.parameters.entry(a2ats::SECTION.to_owned()).or_default();
        own.insert(a2ats::SIZE.to_owned(), codewords.into());
        self
    }
}

/// Fits one layer of a section; each head advances the progress by `units` and tells its line.
///
/// # Errors
/// As [`Fit::layer`].
pub fn fit_layer(
    fit: &dyn Fit,
    states: &LayerStates,
    progress: &dyn Progress,
    units: u64,
) -> Result<LayerPart> {
    let mut part = fit.layer(states, &mut |head, line| {
        progress.advance(units);
        if let Some(line) = line {
            progress.detail(&format!("layer {} head {head}: {line}", states.layer));
        }
    })?;
    if !fit.kind().marks_constant_heads() {
        return Ok(part);
    }
    let (section, layer) = (fit.kind().name(), states.layer);
    let constant = states.constant_heads()?;
    part.mark_constant(&constant);
    for head in constant {
        progress.line(&format!(
            "warning: section `{section}`, layer {layer}, KV head {head}: all keys are equal, so full attention is used"
        ));
    }
    Ok(part)
}
