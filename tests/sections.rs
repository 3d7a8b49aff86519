//! Every declared section has the properties that commands and files expect of it.

use std::collections::BTreeSet;

use kvsmith::internal::artifact::{Fit, FitInput, LayerPart, Section, SectionKind};
use kvsmith::internal::compute::cpu::Cpu;
use kvsmith::internal::env::Silent;
use kvsmith::internal::method::sections::SECTIONS;
use kvsmith::internal::model::Sizes;
use kvsmith::internal::stats::moments::Position;
use kvsmith::internal::store::Spec;

const SIZES: Sizes = Sizes {
    n_layers: 3,
    n_heads: 4,
    n_kv_heads: 2,
    head_dim: 8,
};

/// The fit that a section makes with the default parameters.
fn fit(kind: &dyn SectionKind) -> Box<dyn Fit> {
    let input = FitInput {
        codewords: 4096,
        seed: 1,
        position: Position::Windowed(7),
        block_start: &[0, 4000, 9000],
        seq_len: 5000,
        windows: &[None; 3],
        head_dim: 8,
        kept: &[true; 9000],
        reporter: &Silent,
    };
    kind.fit((kind.parameters().defaults)(), &input).unwrap()
}

/// Zeros for every tensor of a layer.
fn part(specs: &[Spec]) -> LayerPart {
    let tensors = specs
        .iter()
        .map(|s| (s.name.clone(), vec![0; s.bytes().unwrap()]));
    LayerPart {
        tensors: tensors.collect(),
        quality: Vec::new(),
    }
}

#[test]
fn names_are_the_sections_own() {
    let (mut names, mut commands) = (BTreeSet::new(), BTreeSet::new());
    for kind in SECTIONS {
        assert!(names.insert(kind.name()), "{}", kind.name());
        assert!(commands.insert(kind.facts().command), "{}", kind.facts().command);
        let section = Section::new(fit(*kind).as_ref(), SIZES, &Cpu).unwrap();
        for spec in &section.specs {
            assert_eq!(spec.name.split('.').next(), Some(kind.name()));
            assert_eq!(spec.shape[0], SIZES.n_layers, "{}", spec.name);
        }
    }
}

#[test]
fn queries_are_read_by_those_that_say_so() {
    for kind in SECTIONS {
        let fit = fit(*kind);
        assert_eq!(fit.kind().name(), kind.name());
        let rows = fit.query_rows();
        assert_eq!(!rows.is_empty(), kind.facts().reads_queries, "{}", kind.name());
        assert!(rows.is_sorted(), "{}", kind.name());
    }
}

#[test]
fn a_layer_has_exactly_the_tensors_of_its_section() {
    for kind in SECTIONS {
        let mut section = Section::new(fit(*kind).as_ref(), SIZES, &Cpu).unwrap();
        let specs = section.layer_specs();
        section.add(part(&specs)).unwrap();
        let name = &specs[0].name;
        let mut missing = part(&specs);
        missing.tensors.remove(name);
        let mut short = part(&specs);
        short.tensors.get_mut(name).unwrap().pop();
        let mut more = part(&specs);
        more.tensors.insert("other".to_string(), Vec::new());
        for (wrong, culprit) in [(missing, name.as_str()), (short, name), (more, "other")] {
            let error = section.add(wrong).unwrap_err();
            assert!(error.to_string().contains(culprit), "{error}");
        }
    }
}
