//! Which KV heads a method serves alike, and whether they can be served on the device.

use crate::kv::cuda::format;
use crate::kv::{Budget, KvType};
use crate::method::cuda::CudaNeeds;
use crate::method::{Method, MethodPart};
use crate::runner::DecodeOptions;

/// The KV heads that a method serves in the same way, and how.
pub(super) struct Served<'m> {
    pub method: &'m dyn Method,
    pub budget: Budget,
    pub kv: KvType,
    /// The heads of each layer; `None` for all of them.
    pub heads: Option<Vec<Vec<usize>>>,
}

impl<'m> Served<'m> {
    /// Lists the parts of a method.
    pub fn all(method: &'m dyn Method, options: &DecodeOptions) -> Vec<Self> {
        let whole = Self {
            method,
            budget: options.limits.budget,
            kv: options.kv,
            heads: None,
        };
        let parts = method.parts();
        // A single part has all KV heads.
        let is_one = parts.len() == 1;
        let part = |part: MethodPart<'m>| {
            let (budget, kv) = part.own.unwrap_or((options.limits.budget, options.kv));
            Self {
                method: part.method,
                budget,
                kv,
                heads: Some(part.heads).filter(|_| !is_one),
            }
        };
        let parts: Vec<Self> = parts.into_iter().map(part).collect();
        if parts.is_empty() { vec![whole] } else { parts }
    }

    /// Returns whether cache and index can be on the device. `turns` says whether there may be more than one prompt.
    pub fn can(&self, options: &DecodeOptions, turns: bool) -> bool {
        let needs = CudaNeeds {
            kv: self.kv,
            later_prompts: turns,
            rows_on_host: false,
        };
        let has_index = self.method.cuda().is_some_and(|method| method.serves(&needs));
        let has_cache = format::holding(self.kv)
            .is_some_and(|format| format.holds(&options.packed) && !(turns && format.needs_one_prompt()));
        has_index && has_cache
    }
}
