//! Why replies end, and the texts of `--stop`: a reply ends before the first of them.

/// Why a reply ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Stop {
    /// At a stop token of the model, which is the last token of the reply.
    #[serde(rename = "stop")]
    Token,
    /// Before a text of `--stop`.
    #[serde(rename = "stop")]
    Text,
    /// At the maximum number of tokens.
    Length,
    /// At the model's context.
    Context,
    /// At an interrupt by the user.
    Interrupted,
}

/// A filter that passes on the text of a reply up to a stop text, and holds back text that may begin a stop text.
pub struct StopText<'a> {
    stops: &'a [String],
    /// The text that was passed on.
    shown: String,
    /// The text held back, which may begin a stop text.
    held: String,
    found: bool,
}

impl<'a> StopText<'a> {
    /// Starts a reply.
    pub fn new(stops: &'a [String]) -> Self {
        Self {
            stops,
            shown: String::new(),
            held: String::new(),
            found: false,
        }
    }

    /// Takes in more text; returns the text that can be shown.
    pub fn push(&mut self, text: &str) -> String {
        if self.found {
            return String::new();
        }
        self.held += text;
        let first = self
            .stops
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()))
            .min();
        self.found = first.is_some();
        let end = first.unwrap_or_else(|| self.settled());
        let text = self.held[..end].to_owned();
        self.held.drain(..end);
        self.shown += &text;
        text
    }

    /// Returns how many bytes of the held text, from its start, cannot belong to a stop text.
    fn settled(&self) -> usize {
        let may_begin = |at: usize| {
            let rest = &self.held[at..];
            self.stops.iter().any(|stop| stop.starts_with(rest))
        };
        let mut places = self.held.char_indices().map(|(at, _)| at);
        places.find(|at| may_begin(*at)).unwrap_or(self.held.len())
    }

    /// Tells whether a stop text came.
    pub fn is_found(&self) -> bool {
        self.found
    }

    /// Returns the rest of the text that can be shown at the end of the reply, and all text shown.
    pub fn finish(mut self) -> (String, String) {
        let rest = if self.found {
            String::new()
        } else {
            std::mem::take(&mut self.held)
        };
        self.shown += &rest;
        (rest, self.shown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what is shown of a reply in pieces: piece by piece, and in total.
    fn shown(stops: &[&str], pieces: &[&str]) -> (Vec<String>, String) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut filter = StopText::new(&stops);
        let mut out: Vec<String> = pieces.iter().map(|piece| filter.push(piece)).collect();
        let (rest, all) = filter.finish();
        out.push(rest);
        assert_eq!(out.concat(), all);
        (out, all)
    }

    #[test]
    fn text_passes_up_to_a_stop_text() {
        assert_eq!(shown(&[], &["a", "b"]).0, ["a", "b", ""]);
        assert_eq!(shown(&["END"], &["one EN", "D two"]).0, ["one ", "", ""]);
        assert_eq!(
            shown(&["END"], &["one EN", "TER", "E"]).0,
            ["one ", "ENTER", "", "E"]
        );
        assert_eq!(shown(&["\n\n", "##"], &["a\n", "#", "#\n\n"]).1, "a\n");
        assert_eq!(shown(&["aab"], &["aaab"]).1, "a");
        assert_eq!(
            shown(&["\u{e4}\u{f6}"], &["x\u{e4}", "\u{e4}\u{f6}"]).1,
            "x\u{e4}"
        );
        assert_eq!(shown(&["x"], &["", "x", "more"]).1, "");
    }
}
