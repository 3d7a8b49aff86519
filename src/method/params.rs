//! The parameters of all methods.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::a2ats::params::A2atsParams;
use super::ctkvr::params::CtkvrParams;
use super::doublesparsity::params::DoubleSparsityParams;
use super::lfps::params::LfpsParams;
use super::pqcache::params::PqCacheParams;
use super::quest::params::QuestParams;
use super::selfindex::params::SelfIndexParams;
use crate::error::{Error, Result};
use crate::parameters::{ParameterSet, Parameters};

/// The parameters of every method that has some.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MethodParams {
    /// See [`crate::method::a2ats`].
    pub a2ats: A2atsParams,
    /// See [`crate::method::selfindex`].
    pub selfindex: SelfIndexParams,
    /// See [`crate::method::lfps`].
    pub lfps: LfpsParams,
    /// See [`crate::method::ctkvr`].
    pub ctkvr: CtkvrParams,
    /// See [`crate::method::doublesparsity`].
    pub doublesparsity: DoubleSparsityParams,
    /// See [`crate::method::quest`].
    pub quest: QuestParams,
    /// See [`crate::method::pqcache`].
    pub pqcache: PqCacheParams,
}

impl MethodParams {
    /// Describes the parameters of each method that has some; the names are those of the fields.
    pub fn sets() -> [(&'static str, ParameterSet); 7] {
        [
            ("a2ats", A2atsParams::set()),
            ("selfindex", SelfIndexParams::set()),
            ("lfps", LfpsParams::set()),
            ("ctkvr", CtkvrParams::set()),
            ("doublesparsity", DoubleSparsityParams::set()),
            ("quest", QuestParams::set()),
            ("pqcache", PqCacheParams::set()),
        ]
    }

    /// Returns these parameters with those of one method replaced, by name.
    ///
    /// # Errors
    /// A name or a value that the method does not declare.
    pub fn with(&self, method: &str, values: &Map<String, Value>) -> Result<Self> {
        if values.is_empty() {
            return Ok(self.clone());
        }
        let unread = |e: serde_json::Error| {
            Error::invalid(format!("parameters of method `{method}`: {e}")).hint("correct the parameters")
        };
        let mut all = serde_json::to_value(self).map_err(unread)?;
        let own = all.get_mut(method).and_then(Value::as_object_mut);
        let without = || {
            Error::invalid(format!("method `{method}` has no parameters")).hint("leave its parameters out")
        };
        let own = own.ok_or_else(without)?;
        own.extend(values.clone());
        let with: Self = serde_json::from_value(all).map_err(unread)?;
        with.check()?;
        Ok(with)
    }

    /// Returns whether a parameter describes caches whose keys have signs, and then whether its method uses it too.
    pub fn of_caches(name: &str) -> Option<bool> {
        let mut found = SelfIndexParams::OF_CACHES.iter().filter(|(own, _)| *own == name);
        found.next().map(|(_, is_shared)| *is_shared)
    }

    /// Checks every value against its declaration.
    ///
    /// # Errors
    /// A value that its parameter does not take.
    pub fn check(&self) -> Result<()> {
        self.a2ats.check()?;
        self.selfindex.check()?;
        self.lfps.check()?;
        self.ctkvr.check()?;
        self.doublesparsity.check()?;
        self.quest.check()?;
        self.pqcache.check()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_sets_are_those_of_the_fields() {
        let all = serde_json::to_value(MethodParams::default()).unwrap();
        let Value::Object(fields) = all else {
            unreachable!("a struct is an object")
        };
        for (name, set) in MethodParams::sets() {
            assert_eq!(fields[name], Value::Object((set.defaults)()), "{name}");
        }
        assert_eq!(fields.len(), MethodParams::sets().len());
        let mut params = MethodParams::default();
        assert!(params.check().is_ok());
        params.quest.page = 17;
        assert_eq!(params.check().unwrap_err().to_string(), "`page` is 17");
        assert!(serde_json::from_value::<MethodParams>(json!({"quest": {"pages": 16}})).is_err());
    }
}
