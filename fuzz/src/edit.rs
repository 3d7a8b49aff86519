//! Changes of JSON that a fuzzer's bytes describe.

use serde_json::{Map, Value, json};

/// Numbers near which sizes go wrong.
const NUMBERS: [u64; 24] = [
    0,
    1,
    2,
    3,
    4,
    5,
    8,
    16,
    17,
    127,
    256,
    4096,
    4097,
    65_535,
    1 << 24,
    (1 << 31) - 1,
    1 << 31,
    u32::MAX as u64,
    1 << 32,
    (1 << 53) + 1,
    1 << 61,
    (1 << 63) - 1,
    1 << 63,
    u64::MAX,
];

/// Numbers near which arithmetic goes wrong.
const FLOATS: [f64; 12] = [
    0.0,
    -0.0,
    0.5,
    1.0,
    -1.0,
    1e-320,
    1e-38,
    f64::MIN_POSITIVE,
    3.5e38,
    1e300,
    f64::MAX,
    -f64::MAX,
];

/// Values in a value that is not changed any more: copies of copies would have no end.
const LARGE: usize = 4096;

/// Most changes of an input.
const CHANGES: usize = 32;

/// Most bytes of a text that was changed.
const LONG: usize = 1024;

/// A fuzzer's bytes, read from the front; zeros follow the last one.
pub struct Input<'a> {
    bytes: &'a [u8],
    changes: usize,
}

impl<'a> Input<'a> {
    /// Starts at the first byte.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, changes: 0 }
    }

    /// Tells whether another change follows: while there are bytes, but not without end.
    pub fn change(&mut self) -> bool {
        self.changes += 1;
        !self.bytes.is_empty() && self.changes <= CHANGES
    }

    /// Reads a byte.
    pub fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    /// Reads an index below `n`, which is at most 65,536; 0 if `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        let index = usize::from(self.byte()) | usize::from(self.byte()) << 8;
        index % n.max(1)
    }

    /// Reads a number of eight bytes.
    pub fn number(&mut self) -> u64 {
        let mut number = [0; 8];
        let bytes = self.bytes(8);
        number[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(number)
    }

    /// Reads one of the numbers near which sizes go wrong.
    pub fn size(&mut self) -> u64 {
        NUMBERS[usize::from(self.byte()) % NUMBERS.len()]
    }

    /// Reads one of the numbers near which arithmetic goes wrong.
    pub fn float(&mut self) -> f64 {
        FLOATS[usize::from(self.byte()) % FLOATS.len()]
    }

    /// Reads a length, then this many bytes of text.
    pub fn text(&mut self) -> String {
        let len = usize::from(self.byte());
        String::from_utf8_lossy(self.bytes(len)).into_owned()
    }

    /// Reads at most `n` bytes.
    pub fn bytes(&mut self, n: usize) -> &'a [u8] {
        let (bytes, rest) = self.bytes.split_at(n.min(self.bytes.len()));
        self.bytes = rest;
        bytes
    }

    /// Reads all bytes that are left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.bytes)
    }
}

/// Returns the text that an input stands for: itself, or, if its first byte is above ASCII, one of the `bases` with
/// the changes that the other bytes describe.
pub fn json(bytes: &[u8], bases: &[Value]) -> Vec<u8> {
    let mut input = Input::new(bytes);
    if bytes.first().is_none_or(u8::is_ascii) || bases.is_empty() {
        return bytes.to_vec();
    }
    let mut value = bases[usize::from(input.byte() & 0x7f) % bases.len()].clone();
    while input.change() {
        edit(&mut value, &mut input);
    }
    value.to_string().into_bytes()
}

/// Makes one change, unless changes have made the value large.
pub fn edit(root: &mut Value, input: &mut Input) {
    let values = count(root);
    let mut at = input.below(values);
    if values > LARGE {
        return;
    }
    nth(root, &mut at, &mut |node| change(node, input));
}

/// Counts the values within a value, itself included.
fn count(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(count).sum::<usize>(),
        Value::Object(map) => 1 + map.values().map(count).sum::<usize>(),
        _ => 1,
    }
}

/// Calls `work` with the value that has `at` others before it; tells whether there is one.
fn nth(value: &mut Value, at: &mut usize, work: &mut dyn FnMut(&mut Value)) -> bool {
    if *at == 0 {
        work(value);
        return true;
    }
    *at -= 1;
    match value {
        Value::Array(items) => items.iter_mut().any(|item| nth(item, at, work)),
        Value::Object(map) => map.values_mut().any(|member| nth(member, at, work)),
        _ => false,
    }
}

fn change(node: &mut Value, input: &mut Input) {
    let how = input.byte();
    match node {
        Value::Object(map) if how < 160 => change_object(map, how, input),
        Value::Array(items) if how < 160 => match how % 5 {
            0 => drop(items.pop()),
            1 => items.extend(items.last().cloned()),
            2 => items.push(any(&Value::Null, input)),
            3 => items.clear(),
            _ => items.reverse(),
        },
        _ => *node = any(node, input),
    }
}

fn change_object(map: &mut Map<String, Value>, how: u8, input: &mut Input) {
    let at = input.below(map.len());
    let name = map.keys().nth(at).cloned().unwrap_or_default();
    match how % 4 {
        0 => drop(map.remove(&name)),
        1 => drop(map.insert(input.text(), any(&Value::Null, input))),
        2 => {
            let value = map.remove(&name).unwrap_or_default();
            map.insert(input.text(), value);
        }
        _ => {
            let old = map.get(&name).cloned().unwrap_or_default();
            let value = any(&old, input);
            map.insert(name, value);
        }
    }
}

/// Reads a value, which may be near the old one.
fn any(old: &Value, input: &mut Input) -> Value {
    match input.byte() % 14 {
        0 => Value::Null,
        1 => json!(input.byte() % 2 == 1),
        2 => json!(input.size()),
        3 => json!(input.number()),
        4 => json!(-(input.byte() as i64)),
        5 => json!(f64::from_bits(input.number())),
        6 => json!(input.float()),
        7 => json!(input.text()),
        8 => json!([]),
        9 => json!({}),
        10 => json!([old, old]),
        11 => match old.as_f64() {
            Some(x) => json!(x * 1.5),
            None => json!(old.to_string().chars().take(LONG).collect::<String>()),
        },
        12 => match old.as_u64() {
            Some(n) => json!(n.wrapping_add(u64::from(input.byte())).wrapping_sub(128)),
            None => json!({ "x": old }),
        },
        _ => {
            let text = input.text();
            serde_json::from_str(&text).unwrap_or(Value::String(text))
        }
    }
}
