//! Verdicts: what is recommended, and what is refused.

use super::*;

fn row(method: &str, read: f64, kl: f64) -> MethodLoss {
    let heads = || vec![vec![0.5; 2]; 3];
    MethodLoss {
        method: method.to_owned(),
        oracle: method == "topk",
        reads_target: read,
        bytes_read_fraction: read,
        measured: Some(Measured {
            budget: 0.05,
            kl,
            kl_median: 0.0,
            kl_p99: 0.1,
            top1_equal: 1.0,
            perplexity_ratio: 1.01,
            recall: 0.5,
            mass: 0.9,
            output_error: 0.1,
            index_bits_per_token: 64.0,
            heads: HeadLosses {
                recall: heads(),
                mass: heads(),
                output_error: heads(),
            },
            dropped_after: None,
            intervals: None,
            others: Vec::new(),
            probe: None,
        }),
    }
}

fn verdict(rows: Vec<MethodLoss>) -> Verdict {
    Verdict {
        blocks: 1,
        steps: 8,
        sinks: 4,
        window: 64,
        kv: "bf16".to_owned(),
        texts: Vec::new(),
        limits: None,
        probe: None,
        not_probed: None,
        rows,
        formats: Vec::new(),
    }
}

/// Full attention over a cache of this size, with a KL of at most 1.5 times its mean, and at most twice as many points lost.
fn format(kv: &str, read: f64, kl: f64, points: f64) -> FormatLoss {
    FormatLoss {
        kv: kv.to_owned(),
        size_fraction: read,
        measured: bounded("full", 1.0, kl, points).measured.expect("measured"),
    }
}

#[test]
fn the_smallest_format_that_stays_within_the_limits_with_a_setting_is_named() {
    let mut verdict = probed(vec![bounded("wpq", 0.1, 0.01, 1.0)]);
    let named = |verdict: &Verdict| {
        let (_, row) = verdict.usual().expect("a row");
        verdict.format_with(row).map(|of| of.kv.clone())
    };
    assert_eq!(named(&verdict), None);
    // A cache of floats is no smaller.
    verdict.formats = vec![format("bf16", 1.0, 0.0, 0.0), format("f32", 2.0, 0.0, 0.0)];
    assert_eq!(named(&verdict), None);
    // 1.5 (0.01 + 0.002) nats are within 0.03, 1.5 (0.01 + 0.011) are not.
    verdict.formats = vec![
        format("int8", 0.5, 0.0005, 0.1),
        format("int4", 0.3, 0.002, 0.2),
        format("int2", 0.2, 0.011, 0.2),
    ];
    assert_eq!(named(&verdict).as_deref(), Some("int4"));
    // 2 (1 + 1.6) points are more than 5.
    verdict.formats[1] = format("int4", 0.3, 0.002, 1.6);
    assert_eq!(named(&verdict).as_deref(), Some("int8"));
    // Answers above those of full attention make up for nothing.
    verdict.formats[1] = format("int4", 0.3, 0.002, -9.0);
    verdict.rows[0] = bounded("wpq", 0.1, 0.01, 2.6);
    assert_eq!(named(&verdict), None);
    verdict.rows[0] = bounded("wpq", 0.1, 0.01, 2.4);
    assert_eq!(named(&verdict).as_deref(), Some("int4"));
    verdict.formats[1].measured.dropped_after = Some(8);
    assert_eq!(named(&verdict).as_deref(), Some("int8"));
    verdict.formats[1] = format("int4", 0.3, 0.002, 0.2);
    assert!(verdict.check(SIZES).is_ok());
    verdict.formats[0].size_fraction = f64::NAN;
    assert!(verdict.check(SIZES).is_err());
}

/// A row whose KL is at most 1.5 times its mean, and which is this many points below full attention, at most twice as
/// many.
fn bounded(method: &str, read: f64, kl: f64, points: f64) -> MethodLoss {
    let mut row = row(method, read, kl);
    let measured = row.measured.as_mut().expect("measured");
    measured.intervals = Some(Intervals {
        kl: [0.5 * kl, 1.5 * kl],
        kl_p99: [0.0, 1.0],
        top1_equal: [0.9, 1.0],
    });
    measured.probe = Some(Answered {
        accuracy: 0.6,
        points_below: points,
        interval: [-1.0, 2.0 * points],
    });
    row
}

/// A verdict with limits, and with a probe.
fn probed(rows: Vec<MethodLoss>) -> Verdict {
    Verdict {
        blocks: 20,
        limits: Some(LossLimits {
            kl: 0.03,
            points: 5.0,
        }),
        probe: Some(MeasuredProbe {
            kind: "facts".to_owned(),
            length: 2048,
            texts: 20,
            questions: 160,
            full_accuracy: 0.7,
        }),
        ..verdict(rows)
    }
}

/// Not the means but the upper ends count, of the KL and of the probe; a dropped row is never recommended.
#[test]
fn upper_ends_are_compared_with_the_limits() {
    let name = |found: Option<(&MethodLoss, &Measured)>| found.map(|(row, _)| row.method.clone());
    let mut dropped = bounded("ctkvr", 0.05, 0.01, 1.0);
    dropped.measured.as_mut().expect("measured").dropped_after = Some(8);
    let rows = vec![
        dropped,
        bounded("topk", 0.05, 0.001, 0.0),
        bounded("lfps", 0.05, 0.025, 1.0),
        bounded("selfindex", 0.05, 0.01, 3.0),
        bounded("wpq", 0.1, 0.018, 1.0),
        bounded("a2ats", 0.2, 0.001, 0.0),
    ];
    let with = probed(rows);
    assert!(!with.is_guess());
    assert_eq!(name(with.usual()).as_deref(), Some("wpq"));
    assert_eq!(name(with.within(0.04)).as_deref(), Some("lfps"));
    assert_eq!(name(with.within(0.01)).as_deref(), Some("a2ats"));
    // Without a probe, selfindex stays.
    let mut without = with.clone();
    without.probe = None;
    assert_eq!(name(without.usual()).as_deref(), Some("selfindex"));
    // Of each method within the limits, the smallest share.
    let mut twice = with.clone();
    twice.rows.push(bounded("wpq", 0.2, 0.001, 0.0));
    let smallest: Vec<_> = twice
        .smallest_within(0.03)
        .map(|(row, _)| (row.method.as_str(), row.reads_target))
        .collect();
    assert_eq!(smallest, [("wpq", 0.1), ("a2ats", 0.2)]);
    // A row that was not asked is not within the limits.
    let mut unasked = with.clone();
    unasked.rows[4].measured.as_mut().expect("measured").probe = None;
    assert_eq!(name(unasked.usual()).as_deref(), Some("a2ats"));
    // A limit of its own.
    let mut own = with.clone();
    own.limits = Some(LossLimits {
        kl: 0.02,
        points: 6.0,
    });
    assert_eq!(name(own.usual()).as_deref(), Some("selfindex"));
    // Nothing is within the limits: the smallest divergence, but not the dropped one or the bound.
    let poor = probed(vec![
        with.rows[0].clone(),
        with.rows[1].clone(),
        bounded("lfps", 0.2, 0.5, 0.0),
        bounded("wpq", 0.2, 0.4, 0.0),
    ]);
    assert_eq!(name(poor.usual()).as_deref(), Some("wpq"));
    assert!(verdict(vec![row("wpq", 0.1, 0.02)]).is_guess());
    assert!(with.check(SIZES).is_ok());
}

#[test]
fn intervals_and_answers_are_checked() {
    let bad = |change: fn(&mut Measured)| {
        let mut row = bounded("wpq", 0.1, 0.02, 1.0);
        change(row.measured.as_mut().expect("measured"));
        probed(vec![row]).check(SIZES).is_err()
    };
    assert!(!bad(|_| ()));
    assert!(bad(|m| m.intervals.as_mut().expect("intervals").kl = [0.2, 0.1]));
    assert!(bad(
        |m| m.intervals.as_mut().expect("intervals").kl_p99 = [0.1, f64::INFINITY]
    ));
    assert!(bad(|m| m.probe.as_mut().expect("probe").accuracy = 1.5));
    assert!(bad(|m| m.probe.as_mut().expect("probe").interval = [-101.0, 0.0]));
    assert!(bad(|m| m.dropped_after = Some(21)));
    let mut of = probed(vec![bounded("wpq", 0.1, 0.02, 1.0)]);
    of.limits = Some(LossLimits {
        kl: -0.1,
        points: 5.0,
    });
    assert!(of.check(SIZES).is_err());
}

/// The keys of earlier versions alone.
#[test]
fn a_verdict_of_an_earlier_version_is_read() {
    let old = verdict(vec![row("wpq", 0.1, 0.02), row("a2ats", 0.2, 0.001)]);
    let json = serde_json::to_value(&old).expect("JSON");
    let keys = |of: &serde_json::Value| of.as_object().map_or(0, serde_json::Map::len);
    assert_eq!((keys(&json), keys(&json["rows"][0])), (6, 14));
    let read: Verdict = serde_json::from_value(json).expect("a verdict");
    assert_eq!(read, old);
    assert!(read.is_guess() && read.lengths().is_empty());
    assert_eq!(read.usual().map(|(row, _)| row.method.as_str()), Some("wpq"));
}

const SIZES: Sizes = Sizes {
    n_layers: 3,
    n_heads: 4,
    n_kv_heads: 2,
    head_dim: 8,
};

#[test]
fn the_smallest_loss_at_the_smallest_reads_is_recommended() {
    let none = MethodLoss {
        measured: None,
        ..row("a2ats", 0.01, 0.0)
    };
    let all = verdict(vec![
        none.clone(),
        row("topk", 0.02, 0.001),
        row("lfps", 0.05, 0.2),
        row("wpq", 0.1, 0.02),
        row("selfindex", 0.2, 0.004),
    ]);
    let name = |found: Option<(&MethodLoss, &Measured)>| found.map(|(row, _)| row.method.clone());
    assert_eq!(name(all.within(0.3)).as_deref(), Some("lfps"));
    assert_eq!(name(all.within(0.03)).as_deref(), Some("wpq"));
    assert_eq!(name(all.within(0.01)).as_deref(), Some("selfindex"));
    assert_eq!(name(all.within(0.001)), None);
    assert_eq!(name(all.usual()).as_deref(), Some("wpq"));
    let poor = verdict(vec![
        row("lfps", 0.05, 0.2),
        row("ctkvr", 0.3, 0.1),
        row("topk", 0.1, 0.01),
    ]);
    assert_eq!(name(poor.usual()).as_deref(), Some("ctkvr"));
    assert_eq!(name(verdict(vec![none]).usual()), None);
    // At one target, the smaller loss counts, not the last bytes.
    let less = MethodLoss {
        bytes_read_fraction: 0.087,
        ..row("lfps", 0.1, 0.0195)
    };
    let close = verdict(vec![less, row("wpq", 0.1, 0.0088)]);
    assert_eq!(name(close.within(0.03)).as_deref(), Some("wpq"));
}

#[test]
fn values_that_no_measurement_gives_are_refused() {
    assert!(verdict(vec![row("wpq", 0.1, 0.02)]).check(SIZES).is_ok());
    let bad = |change: fn(&mut Measured)| {
        let mut row = row("wpq", 0.1, 0.02);
        change(row.measured.as_mut().expect("measured"));
        verdict(vec![row]).check(SIZES).is_err()
    };
    assert!(bad(|m| m.kl = -1.0));
    assert!(bad(|m| m.mass = 2.0));
    assert!(bad(|m| m.budget = 0.0));
    assert!(bad(|m| m.heads.recall[0].truncate(1)));
    assert!(bad(|m| m.heads.output_error.truncate(1)));
}

#[test]
fn rows_keep_their_form_as_json() {
    let all = verdict(vec![
        row("topk", 0.1, 0.001),
        MethodLoss {
            measured: None,
            ..row("a2ats", 0.3, 0.0)
        },
    ]);
    let json = serde_json::to_value(&all).unwrap();
    assert_eq!(json["rows"][0]["oracle"], true);
    assert_eq!(json["rows"][1].get("kl"), None);
    assert_eq!(serde_json::from_value::<Verdict>(json).unwrap(), all);
}
