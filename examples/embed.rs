//! kvsmith in another program: calibrates the bundled model, prints the verdict, steps sequences together.

use std::path::Path;

use kvsmith::{
    Artifact, Calibration, CalibrationSettings, Corpus, CorpusOptions, CorpusSource, Cpu, Env, Extent,
    Machine, Model, Output, Result, SECTIONS, Silent, VerdictSettings, greedy, recommended,
};

/// Calibrates, then generates with what the verdict recommends.
pub fn main() -> Result<()> {
    let machine = Machine::new(&Cpu, &Silent);
    let model = Model::open(Path::new("calib-data/model"))?;
    let (mut settings, mut cut) = (CalibrationSettings::default(), CorpusOptions::default());
    (cut.seq_len, cut.max_tokens) = (Some(1024), 8192);
    settings.verdict = Some(VerdictSettings::on(4096, 1024));
    let source = CorpusSource::text(["calib-data/text.txt".into()]);
    let (text, beyond) =
        Corpus::load_with_reserve(&model.path, model.config(), &source, &cut, settings.beyond(1024))?;
    let path = std::env::temp_dir().join(format!("kvsmith-{}.safetensors", std::process::id()));
    let calibration = Calibration::new(machine, &model, &settings, (&text, &beyond))?;
    let made = calibration.run(Output::create(&path)?, None)?;
    let verdict = made.verdict.transpose()?.expect("the settings ask for one");
    if let Some((row, measured)) = verdict.usual() {
        let (name, budget, kl) = (&row.method, measured.budget, measured.kl);
        println!("recommended: {name} with budget {budget}, KL {kl:.4}");
    }
    let artifact = Artifact::open(&path, SECTIONS)?;
    let _ = std::fs::remove_file(path); // it is open
    let (method, options) = recommended(&artifact, &model, 0)?;
    let mut engine = machine.engine(&model.decoder, method.as_ref(), options, &Extent::up_to(512))?;
    let tokenizer = model.tokenizer()?;
    let mut replies = Vec::new();
    for prompt in [
        "The lighthouse",
        "In the morning the three of them walked down to",
    ] {
        let id = engine.open(64)?;
        let logits = engine.prefill(id, &tokenizer.encode(prompt)?)?;
        replies.push((id, vec![greedy(logits.view())?]));
    }
    let (third, env) = (engine.open(64)?, Env::default());
    env.cancel.cancel(); // as another thread would
    let ended = env.during(|| engine.prefill(third, &tokenizer.encode("A letter came.")?));
    println!("third: {}", ended.expect_err("it was cancelled"));
    for _ in 0..20 {
        let fed: Vec<_> = replies
            .iter()
            .map(|(id, ids)| (*id, ids[ids.len() - 1]))
            .collect();
        for ((_, ids), logits) in replies.iter_mut().zip(engine.step(&fed)?) {
            ids.push(greedy(logits.view())?);
        }
    }
    let shown = |(id, ids): &(_, Vec<u32>)| tokenizer.decode(ids).map(|text| println!("{id}: {text}"));
    replies.iter().try_for_each(shown)
}
