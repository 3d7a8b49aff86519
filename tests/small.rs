//! The tables of the small model in `docs/dev/replication.md` against the numbers that they are made from.

use crate::common::root;

// The tables have their own program, examples/small, whose other parts measure.
#[allow(dead_code)]
#[path = "../examples/small/groups.rs"]
mod groups;
#[path = "../examples/small/page.rs"]
mod page;

#[test]
fn tables_are_of_the_committed_numbers() {
    let numbers = std::fs::read_to_string(root().join("docs/dev/small/small.json")).unwrap();
    let page = std::fs::read_to_string(root().join("docs/dev/replication.md")).unwrap();
    let written = page::replaced(&page, &serde_json::from_str(&numbers).unwrap()).expect("marks");
    assert!(
        page == written,
        "docs/dev/replication.md differs from docs/dev/small/small.json: \
         cargo run --example small -- PROGRAM FOLDER page"
    );
}
