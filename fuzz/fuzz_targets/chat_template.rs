//! A chat template, compiled and rendered: the text of `chat_template.jinja`, or, if it starts with a brace and ends
//! with one, of `tokenizer_config.json`.
#![no_main]

use std::sync::LazyLock;

use kvsmith::internal::model::chat::{ChatTemplate, Message};
use kvsmith_fuzz::{Folder, share_counters};
use libfuzzer_sys::fuzz_target;

static FOLDERS: LazyLock<[Folder; 2]> = LazyLock::new(|| {
    share_counters();
    let [plain, json] = [Folder::new(), Folder::new()];
    plain.write(
        "tokenizer_config.json",
        br#"{"bos_token": "<s>", "eos_token": {"content": "</s>"}}"#,
    );
    [plain, json]
});

fuzz_target!(|data: &[u8]| {
    let [plain, json] = &*FOLDERS;
    let folder = match serde_json::from_slice::<serde_json::Value>(data) {
        Ok(_) => {
            json.write("tokenizer_config.json", data);
            json
        }
        Err(_) => {
            plain.write("chat_template.jinja", data);
            plain
        }
    };
    let Ok(Some(template)) = ChatTemplate::open(folder.dir()) else {
        return;
    };
    let message = |role: &'static str, content: &str| Message {
        role: role.into(),
        content: content.to_string(),
    };
    let mut messages = vec![
        message("system", "Be short."),
        message("user", "Hi <b>\u{e4}</b>"),
    ];
    if template.render(&messages, true).is_ok() {
        messages.extend([message("assistant", "Hello"), message("user", "{{ x }}")]);
        let _ = template.render(&messages, false);
    }
});
