//! What the formats of cached rows declare, against the caches that they allocate.

use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::compute::cuda::ledger::Ledger;
use kvsmith::internal::kv::cuda::Shape;
use kvsmith::internal::kv::cuda::format::formats;

/// Bytes by which the arrays of a cache may be larger together, as each takes a multiple of 512.
const ROUNDING: usize = 16 * 512;

pub fn check(driver: &dyn Driver) {
    for format in formats() {
        for head_dim in [64, 96, 128] {
            let shape = Shape {
                sequences: 1,
                kv_heads: 2,
                group: 4,
                head_dim,
                capacity: 1000,
            };
            let ledger = Ledger::new(driver);
            let cache = format.cache(&ledger, shape).unwrap();
            let (kv, taken) = (format.kv(), ledger.most().total() as usize);
            let of_head = shape.capacity * format.bytes_per_position(&shape) + format.fixed_bytes(&shape);
            let declared = shape.heads() * of_head;
            let expected = declared..=declared + ROUNDING;
            assert!(
                expected.contains(&taken),
                "{kv}, {head_dim} channels: {taken}, not {expected:?}"
            );
            assert_eq!(cache.plain().is_some(), format.is_plain(), "{kv}");
            assert_eq!(cache.signs().is_some(), kv.keys.has_signs(), "{kv}");
        }
    }
}
