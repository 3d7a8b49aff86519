//! The pages: their links lead somewhere, and the ones that users read stay short.

use std::collections::BTreeSet;
use std::path::PathBuf;

use sha2::{Digest as _, Sha256};

use crate::common::root;

/// The most lines of pages for users.
const LIMITS: [(&str, usize); 9] = [
    ("README.md", 110),
    ("docs/tutorial.md", 130),
    ("docs/guide.md", 200),
    ("docs/methods.md", 180),
    ("docs/results.md", 120),
    ("docs/performance.md", 110),
    ("docs/eval.md", 120),
    ("docs/cluster.md", 120),
    ("CHANGELOG.md", 35),
];

/// Lists the Markdown files of the repository, but for those of build folders.
fn pages() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
        .map(|name| root().join(name))
        .into();
    let mut folders = vec![root().join("docs"), root().join("calib-data")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "md") {
                found.push(path);
            }
        }
    }
    found
}

/// Returns the text outside fenced blocks.
fn prose(text: &str) -> String {
    let parts = text.split("\n```").step_by(2);
    parts.collect::<Vec<_>>().join("\n")
}

/// Returns the targets of links and pictures.
fn links(text: &str) -> Vec<String> {
    let starts = ["](", "src=\"", "srcset=\""];
    let ends = [')', '"', '"'];
    let found = starts.iter().zip(ends).flat_map(|(start, end)| {
        let parts = text.split(start).skip(1);
        parts.filter_map(move |rest| Some(rest.split_once(end)?.0.to_owned()))
    });
    found.filter(|target| !target.contains("://")).collect()
}

/// Returns the anchors of a page's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let anchor = |line: &str| -> String {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title
            .chars()
            .filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

#[test]
fn every_link_leads_somewhere() {
    let (mut broken, mut count) = (Vec::new(), 0);
    for page in pages() {
        let text = prose(&std::fs::read_to_string(&page).unwrap());
        for link in links(&text) {
            count += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match file {
                "" => page.clone(),
                file => page.parent().unwrap().join(file),
            };
            let reached = target.exists()
                && (anchor.is_empty()
                    || anchors(&prose(&std::fs::read_to_string(&target).unwrap())).contains(anchor));
            if !reached {
                broken.push(format!(
                    "{}: {link}",
                    page.strip_prefix(root()).unwrap().display()
                ));
            }
        }
    }
    assert!(count > 50, "{count}");
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn pages_for_users_stay_short() {
    for (name, most) in LIMITS {
        let text = std::fs::read_to_string(root().join(name)).unwrap();
        let lines = text.lines().count();
        assert!(lines <= most, "{name}: {lines} lines, at most {most}");
    }
}

/// A percent sign follows its number without a space.
#[test]
fn percent_signs_follow_their_numbers() {
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        let mut spaced = text.match_indices(" %").map(|(at, _)| at);
        let found = spaced.find(|at| text[..*at].ends_with(|c: char| c.is_ascii_digit()));
        let shown = found.map(|at| {
            let start = text[..at].char_indices().rev().nth(30).map_or(0, |(i, _)| i);
            text[start..at + 2].to_owned()
        });
        assert!(shown.is_none(), "{}: {shown:?}", page.display());
    }
}

/// The pictures of a report hold the digest of the data that they show, which is committed beside them.
#[test]
fn pictures_are_of_the_committed_report() {
    let folder = root().join("docs/pictures");
    let data = std::fs::read(folder.join("report.json")).unwrap();
    let digest: String = Sha256::digest(&data).iter().map(|b| format!("{b:02x}")).collect();
    for name in ["report-wide.png", "report-phone.png"] {
        let picture = std::fs::read(folder.join(name)).unwrap();
        let keyword = b"tEXtkvsmith-report\0";
        let at = picture.windows(keyword.len()).position(|bytes| bytes == keyword);
        let start = at.unwrap_or_else(|| panic!("{name} has no digest: make screenshots")) + keyword.len();
        let held = std::str::from_utf8(&picture[start..start + 64]).unwrap();
        assert_eq!(held, digest, "{name} is not of report.json: make screenshots");
    }
}
