//! Text for people: sizes, counts, times, lines that fit, and names that no terminal obeys.

use std::borrow::Cow;

/// Breaks the lines of a text between words, so that they have at most `columns` characters; what follows a break is
/// indented by two more spaces than its line. Words that are longer stay whole.
pub fn wrapped(text: &str, columns: usize) -> String {
    let lines: Vec<String> = text.split('\n').map(|line| wrapped_line(line, columns)).collect();
    lines.join("\n")
}

fn wrapped_line(line: &str, columns: usize) -> String {
    if line.chars().count() <= columns {
        return line.to_owned();
    }
    let words = line.trim_start_matches(' ');
    let indent = line.len() - words.len();
    let (mut out, mut width) = (" ".repeat(indent), indent);
    for (i, word) in words.split(' ').enumerate() {
        let length = word.chars().count();
        if i > 0 && width + 1 + length > columns {
            out += &format!("\n{}", " ".repeat(indent + 2));
            width = indent + 2;
        } else if i > 0 {
            out.push(' ');
            width += 1;
        }
        out += word;
        width += length;
    }
    out
}

/// Escapes the control characters of a text except for line breaks and tabs, and the marks that change the direction of
/// writing: names and metadata come from files, and a terminal would obey them.
pub fn harmless(text: &str) -> Cow<'_, str> {
    let turns = |c: char| matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let obeyed = |c: char| c.is_control() && c != '\n' && c != '\t' || turns(c);
    if !text.contains(obeyed) {
        return Cow::Borrowed(text);
    }
    let escaped = |c: char| {
        if obeyed(c) {
            c.escape_default().to_string()
        } else {
            c.to_string()
        }
    };
    Cow::Owned(text.chars().map(escaped).collect())
}

/// Replaces the settings that a text names, as in `⟨seq_len⟩` and `⟨device=cpu⟩`, by what `write` gives for a name and its value.
pub fn settings<'a>(text: &'a str, write: impl Fn(&str, Option<&str>) -> String) -> Cow<'a, str> {
    let (mut out, mut rest) = (String::new(), text);
    while let Some((before, (inside, after))) = rest
        .split_once('⟨')
        .and_then(|(a, b)| Some((a, b.split_once('⟩')?)))
    {
        let (name, value) = inside
            .split_once('=')
            .map_or((inside, None), |(name, value)| (name, Some(value)));
        out += before;
        if name.chars().all(|c| c.is_ascii_lowercase() || c == '_') {
            out += &write(name, value)
        } else {
            // What comes from a file, such as a name, stays as it is.
            out += &format!("⟨{inside}⟩")
        }
        rest = after;
    }
    if out.is_empty() {
        Cow::Borrowed(text)
    } else {
        Cow::Owned(out + rest)
    }
}

/// Formats a number of bytes for people: `812 bytes`, `23.0 KB`, `4.33 MB`, `2.47 GB`, `7.86 TB`.
pub fn size(bytes: usize) -> String {
    if bytes >= 1_000_000_000_000 {
        format!("{:.2} TB", bytes as f64 / 1e12)
    } else if bytes >= 1_000_000_000 {
        format!("{:.2} GB", bytes as f64 / 1e9)
    } else if bytes < 1000 {
        format!("{bytes} bytes")
    } else if bytes < 1_000_000 {
        format!("{:.1} KB", bytes as f64 / 1e3)
    } else {
        format!("{:.2} MB", bytes as f64 / 1e6)
    }
}

/// Writes a number with what it counts: `1 block`, `20 blocks`.
pub fn counted(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// Writes a number with commas between groups of three digits: `12,345`.
pub fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Formats seconds for people: `0.42 s`, `17 s`, `4.2 min`, `3.5 h`.
pub fn duration(seconds: f64) -> String {
    match seconds {
        ..10.0 => format!("{seconds:.2} s"),
        ..120.0 => format!("{seconds:.0} s"),
        ..7200.0 => format!("{:.1} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_written_by_the_caller() {
        let write = |name: &str, value: Option<&str>| format!("[{name}|{}]", value.unwrap_or_default());
        let written = |text| settings(text, write).into_owned();
        assert_eq!(
            written("use ⟨device=cpu⟩, or a smaller ⟨seq_len⟩."),
            "use [device|cpu], or a smaller [seq_len|]."
        );
        assert_eq!(written("⟨size=3⟩"), "[size|3]");
        // Names in files are no settings.
        for text in ["none", "⟨open", "open⟩", "⟨Big Name⟩.txt", "⟨../x⟩ and ⟨ ⟩"] {
            assert_eq!(written(text), text);
        }
    }

    #[test]
    fn digits_are_grouped() {
        assert_eq!(
            [0, 999, 1000, 1_234_567].map(grouped),
            ["0", "999", "1,000", "1,234,567"]
        );
    }

    #[test]
    fn long_lines_are_broken_between_words() {
        assert_eq!(wrapped("one two three", 13), "one two three");
        assert_eq!(
            wrapped("one two three\n four five", 8),
            "one two\n  three\n four\n   five"
        );
        assert_eq!(
            wrapped("/a/path/without/spaces is kept", 10),
            "/a/path/without/spaces\n  is kept"
        );
    }
}
