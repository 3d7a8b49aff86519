//! `docs/small.md` against the numbers that it is made from.

use crate::common::root;

// The page has its own program, examples/small, whose other parts measure.
#[allow(dead_code)]
#[path = "../examples/small/groups.rs"]
mod groups;
#[path = "../examples/small/page.rs"]
mod page;

#[test]
fn page_is_of_the_committed_numbers() {
    let numbers = std::fs::read_to_string(root().join("docs/small/small.json")).unwrap();
    let written = page::page(&serde_json::from_str(&numbers).unwrap());
    let page = std::fs::read_to_string(root().join("docs/small.md")).unwrap();
    assert!(
        page == written,
        "docs/small.md differs from docs/small/small.json: cargo run --example small -- PROGRAM FOLDER page"
    );
}
