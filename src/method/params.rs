//! The parameters of all methods.

use serde::{Deserialize, Serialize};

use super::a2ats::params::A2atsParams;
use super::ctkvr::params::CtkvrParams;
use super::doublesparsity::params::DoubleSparsityParams;
use super::lfps::params::LfpsParams;
use super::pqcache::params::PqCacheParams;
use super::quest::params::QuestParams;
use super::selfindex::params::SelfIndexParams;
use crate::error::Result;
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
    use serde_json::{Value, json};

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
