//! A text file, or stdin, that is read only as far as its text is needed.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use super::documents::{KINDS, STDIN};
use crate::env;
use crate::error::{Error, Result};

/// Most bytes that are taken from a compressed file.
const MOST_BYTES: usize = 1 << 32;

/// Most bytes of a line.
const MOST_OF_LINE: usize = 1 << 28;

/// Bytes that are read between two checks for an interrupt.
const CHUNK: usize = 1 << 22;

/// The byte order mark with which some editors start a file.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// A file that is read from its beginning on, once; what was read stays in memory.
pub struct Source {
    path: PathBuf,
    reader: Box<dyn Read>,
    is_compressed: bool,
    bytes: Vec<u8>,
    /// Whether nothing is left to read.
    is_read: bool,
}

impl Source {
    /// Opens a file, decompressing one whose name ends in `.gz`; `-` is stdin.
    pub fn open(path: &Path) -> Result<Self> {
        let open = || File::open(path).map_err(|e| Error::io(path, "read", &e));
        let is_compressed = path.extension().is_some_and(|e| e == "gz");
        let reader: Box<dyn Read> = match path == Path::new(STDIN) {
            true => Box::new(std::io::stdin().lock()),
            false if is_compressed => Box::new(MultiGzDecoder::new(open()?)),
            false => Box::new(open()?),
        };
        let mut source = Self {
            path: path.to_owned(),
            reader,
            is_compressed,
            bytes: Vec::new(),
            is_read: false,
        };
        source.fill(MARK.len().max(4))?;
        if source.bytes.starts_with(b"PAR1") {
            return Err(Error::unsupported(format!("{} is a Parquet file", path.display())).hint(
                "convert it to JSON lines: pandas.read_parquet(\"F.parquet\").to_json(\"F.jsonl\", orient=\"records\", lines=True)",
            ));
        }
        if source.bytes.starts_with(MARK) {
            source.bytes.drain(..MARK.len());
        }
        Ok(source)
    }

    /// Reads until `n` bytes are in memory, or everything is.
    fn fill(&mut self, n: usize) -> Result<()> {
        while !self.is_read && self.bytes.len() < n {
            env::check()?;
            let most = CHUNK.min(n - self.bytes.len());
            let mut part = (&mut self.reader).take(most as u64);
            let read = part.read_to_end(&mut self.bytes).map_err(|e| {
                if self.is_compressed {
                    Error::damaged(format!("{} cannot be decompressed: {e}", self.path.display())).hint(
                        "the file is damaged or not a gzip file; recreate it, or give the uncompressed file",
                    )
                } else {
                    Error::io(&self.path, "read", &e)
                }
            })?;
            self.is_read = read == 0;
            if self.is_compressed && self.bytes.len() > MOST_BYTES {
                let what = format!("{} has more than 4 GiB of text", self.path.display());
                return Err(Error::invalid(what).hint("give a part of it; a part is enough for calibration"));
            }
        }
        Ok(())
    }

    /// Returns the first `n` bytes as text, without a character that is cut, and whether this is everything.
    pub fn text(&mut self, n: usize) -> Result<(&str, bool)> {
        // One byte more tells whether there is more.
        self.fill(n.saturating_add(1))?;
        let is_all = self.is_read && self.bytes.len() <= n;
        let bytes = &self.bytes[..n.min(self.bytes.len())];
        match (std::str::from_utf8(bytes), is_all) {
            (Ok(text), _) => Ok((text, is_all)),
            (Err(e), false) if e.error_len().is_none() => {
                let (text, _) = bytes.split_at(e.valid_up_to());
                let text = std::str::from_utf8(text).map_err(|_| self.not_text(e.valid_up_to()))?;
                Ok((text, false))
            }
            (Err(e), _) => Err(self.not_text(e.valid_up_to())),
        }
    }

    /// Returns the line that begins at byte `at`, without its end, and where the next one begins; `None` at the end.
    pub fn line(&mut self, at: usize) -> Result<Option<(&str, usize)>> {
        let mut searched = at;
        let end = loop {
            let new = self.bytes.get(searched..).unwrap_or_default();
            match new.iter().position(|byte| *byte == b'\n') {
                Some(i) => break searched + i,
                None if self.is_read && at >= self.bytes.len() => return Ok(None),
                None if self.is_read => break self.bytes.len(),
                None if self.bytes.len() - at.min(self.bytes.len()) > MOST_OF_LINE => {
                    let what = format!("{} has a line of more than 256 MiB", self.path.display());
                    return Err(Error::invalid(what).hint("write one document per line"));
                }
                None => {
                    searched = self.bytes.len();
                    self.fill(2 * searched.max(CHUNK / 2))?;
                }
            }
        };
        let line = &self.bytes[at..end];
        let line = std::str::from_utf8(line).map_err(|e| self.not_text(at + e.valid_up_to()))?;
        Ok(Some((line.strip_suffix('\r').unwrap_or(line), end + 1)))
    }

    fn not_text(&self, byte: usize) -> Error {
        Error::invalid(format!("{} is not UTF-8 text (byte {byte})", self.path.display()))
            .hint(format!("convert it to UTF-8, for example with iconv; {KINDS}"))
    }
}
