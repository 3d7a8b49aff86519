//! The template engine: Jinja with the environment that transformers offers.
//!
//! Nothing here bounds the memory, stack and time that a template takes; [`crate::sandbox`] does.

use std::ffi::CString;
use std::io::{self, Write};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{AutoEscape, Environment, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use super::Message;

type Rendered<T> = std::result::Result<T, minijinja::Error>;

/// Most template instructions per rendering; real templates take a few hundred per message.
const FUEL: u64 = 1_000_000;

/// Bytes that a rendering may have beyond 16 times the bytes of the messages.
const SLACK: usize = 1 << 17;

/// Most characters of an error message, since templates can raise errors with a text of their own.
const LONGEST_ERROR: usize = 1000;

/// Compiles a template.
///
/// # Errors
/// The text of a syntax error.
pub fn compile(source: &str, tokens: &[(String, Value)]) -> Result<Environment<'static>, String> {
    let compiled = || {
        let mut environment = environment()?;
        for (name, token) in tokens {
            environment.add_global(name.clone(), token.clone());
        }
        environment.add_template_owned("template", without_generation_tags(source))?;
        Ok(environment)
    };
    compiled().map_err(|e| unusable(&e))
}

/// Renders a conversation with a compiled template.
///
/// # Errors
/// The text of the failure: an error of the template, too many instructions or too much text.
pub fn render(
    environment: &Environment,
    messages: &[Message],
    add_generation_prompt: bool,
) -> Result<String, String> {
    let content_bytes: usize = messages.iter().map(|m| m.content.len()).sum();
    let mut out = Bounded {
        text: Vec::new(),
        limit: content_bytes.saturating_mul(16).saturating_add(SLACK),
        full: false,
    };
    let context = minijinja::context! {
        messages => Value::from(Serde(messages)),
        add_generation_prompt => add_generation_prompt,
        tools => Value::from(()),
        documents => Value::from(()),
    };
    let template = environment.get_template("template");
    match template.and_then(|template| template.render_captured_to(context, &mut out).map(drop)) {
        Err(_) if out.full => Err(format!("its output exceeds the limit of {} bytes", out.limit)),
        Err(e) => Err(unusable(&e)),
        Ok(()) => String::from_utf8(out.text).map_err(|e| e.to_string()),
    }
}

fn unusable(e: &minijinja::Error) -> String {
    match e.kind() {
        ErrorKind::OutOfFuel => "it does not finish".to_string(),
        _ => e.to_string().chars().take(LONGEST_ERROR).collect(),
    }
}

/// Makes the environment that transformers offers to templates.
fn environment() -> Rendered<Environment<'static>> {
    let mut environment = Environment::new();
    environment.set_syntax(
        SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()?,
    );
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", |message: String| -> Rendered<String> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", strftime_now);
    Ok(environment)
}

/// Replaces the tags that mark the assistant's text for training by a condition that is always true, so that they have
/// no effect.
fn without_generation_tags(source: &str) -> String {
    let (mut out, mut rest) = (String::new(), source);
    while let Some(start) = rest.find("{%")
        && let Some(len) = rest[start + 2..].find("%}")
    {
        let (before, after) = rest.split_at(start + 2 + len);
        let (text, tag) = before.split_at(start);
        out += text;
        match tag[2..].trim_matches(|c: char| c.is_whitespace() || "-+".contains(c)) {
            "generation" => out += &tag.replace("generation", "if true"),
            "endgeneration" => out += &tag.replace("endgeneration", "endif"),
            _ => out += tag,
        }
        rest = after;
    }
    out + rest
}

/// Formats the local time as C and Python do.
fn strftime_now(format: &str) -> Rendered<String> {
    let format = CString::new(format)
        .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e.to_string()))?;
    let mut text = [0u8; 256];
    // SAFETY: `tm` is a plain struct that `localtime_r` fills; `strftime` writes at most
    // `text.len()` bytes and returns how many.
    let len = unsafe {
        let now = libc::time(std::ptr::null_mut());
        let mut tm: libc::tm = std::mem::zeroed();
        libc::localtime_r(&now, &mut tm);
        libc::strftime(text.as_mut_ptr().cast(), text.len(), format.as_ptr(), &tm)
    };
    Ok(String::from_utf8_lossy(&text[..len]).into_owned())
}

/// Serialises a value like Python's `json.dumps` as transformers calls it: no escapes for HTML, and
/// separators with spaces.
fn tojson(value: Value, options: Kwargs) -> Rendered<String> {
    let failed = |e: serde_json::Error| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string());
    let indent: Option<u8> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let value = match sort_keys {
        Some(true) => Value::from(Serde(serde_json::to_value(&value).map_err(failed)?)),
        _ => value,
    };
    let mut out = Vec::new();
    match indent {
        Some(n) => {
            let indent = vec![b' '; n.into()];
            let pretty = PrettyFormatter::with_indent(&indent);
            value.serialize(&mut Serializer::with_formatter(&mut out, pretty))
        }
        None => {
            let [item, key] = separators
                .and_then(|s| s.try_into().ok())
                .unwrap_or_else(|| [", ".to_string(), ": ".to_string()]);
            value.serialize(&mut Serializer::with_formatter(&mut out, Spaced { item, key }))
        }
    }
    .map_err(failed)?;
    let text = String::from_utf8_lossy(&out).into_owned();
    Ok(match ensure_ascii {
        Some(true) => ascii(&text),
        _ => text,
    })
}

/// Escapes every non-ASCII character as `\u` and four hexadecimal digits; in JSON such characters occur only within strings.
fn ascii(json: &str) -> String {
    let escape = |unit: &mut u16| format!("\\u{unit:04x}");
    let one = |c: char| match c {
        _ if c.is_ascii() => c.to_string(),
        _ => c.encode_utf16(&mut [0; 2]).iter_mut().map(escape).collect(),
    };
    json.chars().map(one).collect()
}

/// A JSON formatter that writes one line with the given separators.
struct Spaced {
    item: String,
    key: String,
}

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        let separator = if first { "" } else { &self.item };
        out.write_all(separator.as_bytes())
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.begin_array_value(out, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key.as_bytes())
    }
}

/// A text buffer with a maximum length.
struct Bounded {
    text: Vec<u8>,
    limit: usize,
    full: bool,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.text.len() + bytes.len() > self.limit {
            self.full = true;
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
