//! The formats of cached rows, by name. A new format is one file with a [`Format`], and one line in [`FORMATS`].

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::qkv::Part;
use super::rows::Format;
use super::{float, int8, layered, low_bit, packed};
use crate::float::Float;

/// All formats, in the order of the help.
pub static FORMATS: &[RowFormat] = &[
    RowFormat::F32,
    RowFormat::F16,
    RowFormat::BF16,
    RowFormat::INT8,
    RowFormat::INT4_4,
    RowFormat::INT4,
    RowFormat::INT2,
    RowFormat::TWO_BIT,
];

/// One of [`FORMATS`].
#[derive(Clone, Copy)]
pub struct RowFormat(&'static dyn Format);

impl RowFormat {
    /// 32-bit floats.
    pub const F32: Self = Self(&float::F32);
    /// 16-bit floats (IEEE half precision).
    pub const F16: Self = Self(&float::F16);
    /// 16-bit floats (bfloat16).
    pub const BF16: Self = Self(&float::BF16);
    /// 8 bits, with a scale per 64 channels.
    pub const INT8: Self = Self(&int8::Int8s);
    /// 8 bits in two layers of 4 after a map, with a range per channel.
    pub const INT4_4: Self = Self(&layered::Layers);
    /// 4 bits after a map.
    pub const INT4: Self = Self(&low_bit::INT4);
    /// 2 bits after a map.
    pub const INT2: Self = Self(&low_bit::INT2);
    /// Signs and 2-bit magnitudes of keys, 2-bit values.
    pub const TWO_BIT: Self = Self(&packed::TwoBits);

    /// Returns the format of this name; `None` for other text.
    pub fn named(name: &str) -> Option<Self> {
        FORMATS.iter().copied().find(|format| format.as_str() == name)
    }

    /// Returns the name on the command line and in results.
    pub fn as_str(self) -> &'static str {
        self.0.word().name
    }

    /// Returns the bytes of a row of d channels.
    pub fn bytes(self, part: Part, d: usize) -> usize {
        self.0.arrays(part, d).into_iter().flatten().sum()
    }
}

impl std::ops::Deref for RowFormat {
    type Target = dyn Format;

    fn deref(&self) -> &Self::Target {
        self.0
    }
}

impl PartialEq for RowFormat {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for RowFormat {}

impl fmt::Debug for RowFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for RowFormat {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for RowFormat {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let names = || FORMATS.iter().map(|format| format.as_str()).collect::<Vec<_>>();
        let unknown = || {
            let names = names().join(", ");
            serde::de::Error::custom(format!("unknown row format `{text}`; the formats are {names}"))
        };
        Self::named(&text).ok_or_else(unknown)
    }
}

impl From<Float> for RowFormat {
    fn from(float: Float) -> Self {
        match float {
            Float::F32 => Self::F32,
            Float::F16 => Self::F16,
            Float::Bf16 => Self::BF16,
        }
    }
}

/// The formats of cached keys and values. Its text is a format's name if both are the same, else `k=FORMAT,v=FORMAT`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KvType {
    /// The format of keys.
    pub keys: RowFormat,
    /// The format of values.
    pub values: RowFormat,
}

impl KvType {
    /// 32-bit floats.
    pub const F32: Self = Self::both(RowFormat::F32);
    /// 16-bit floats (IEEE half precision).
    pub const F16: Self = Self::both(RowFormat::F16);
    /// 16-bit floats (bfloat16).
    pub const BF16: Self = Self::both(RowFormat::BF16);
    /// 8 bits, with a scale per 64 channels.
    pub const INT8: Self = Self::both(RowFormat::INT8);
    /// Signs, 2-bit magnitudes and 2-bit values, and up to 64 positions in f16 (Self-Indexing KVCache).
    pub const TWO_BIT: Self = Self::both(RowFormat::TWO_BIT);

    /// Stores keys and values in the same format.
    pub const fn both(format: RowFormat) -> Self {
        Self {
            keys: format,
            values: format,
        }
    }

    /// Parses the text form; `None` for other text.
    pub fn named(text: &str) -> Option<Self> {
        if let Some(format) = RowFormat::named(text) {
            return Some(Self::both(format));
        }
        let (mut keys, mut values) = (None, None);
        for half in text.split(',') {
            let (part, format) = half.split_once('=')?;
            let to = match part {
                "k" => &mut keys,
                "v" => &mut values,
                _ => return None,
            };
            if to.replace(RowFormat::named(format)?).is_some() {
                return None;
            }
        }
        keys.zip(values).map(|(keys, values)| Self { keys, values })
    }

    /// Returns the bytes of a key and a value of d channels.
    pub fn bytes_per_position(self, d: usize) -> usize {
        self.bytes_per_key(d) + self.values.bytes(Part::Values, d)
    }

    /// Returns the bytes of a key and a value of d channels in floats: as they are cached, or in bf16 where the cache has no
    /// floats.
    pub fn uncompressed_bytes(self, d: usize) -> usize {
        let bytes = |format: RowFormat, part| {
            let own = if format.float().is_some() {
                format
            } else {
                RowFormat::BF16
            };
            own.bytes(part, d)
        };
        bytes(self.keys, Part::Keys) + bytes(self.values, Part::Values)
    }

    /// Returns the bytes of a key of d channels.
    pub fn bytes_per_key(self, d: usize) -> usize {
        self.keys.bytes(Part::Keys, d)
    }

    /// Returns the bytes per position of each array that holds keys, then of each that holds values.
    pub fn row_arrays(self, d: usize) -> [[Option<usize>; 2]; 2] {
        [
            self.keys.arrays(Part::Keys, d),
            self.values.arrays(Part::Values, d),
        ]
    }

    /// Returns the float type of both; `None` if they differ, or are no floats.
    pub fn float(self) -> Option<Float> {
        self.keys.float().filter(|_| self.keys == self.values)
    }

    /// Returns whether sinks and window are held in another way than other rows.
    pub fn has_ends(self) -> bool {
        [self.keys, self.values]
            .iter()
            .any(|format| format.end_bytes(1).is_some())
    }

    /// Returns the formats of the rows of a context of `n` positions, `ends` of which are sinks or in the window.
    pub fn in_context(self, n: usize, ends: usize) -> Self {
        let of = |format: RowFormat| {
            let first = format.first_packed();
            if first > 0 && n < ends.saturating_add(first) {
                RowFormat::BF16
            } else {
                format
            }
        };
        Self {
            keys: of(self.keys),
            values: of(self.values),
        }
    }

    /// Returns how many bytes more than others a key and a value of d channels among the sinks or in the window take.
    pub fn more_per_end(self, d: usize) -> usize {
        let more = |format: RowFormat, part| {
            let own = format.end_bytes(d);
            // Padded, a row of very few channels may take more than in bf16.
            own.map_or(0, |bytes| bytes.saturating_sub(format.bytes(part, d)))
        };
        more(self.keys, Part::Keys) + more(self.values, Part::Values)
    }

    /// Returns the bytes of what all keys and values of d channels share.
    pub fn shared_bytes(self, d: usize) -> usize {
        self.keys.shared_bytes(d) + self.values.shared_bytes(d)
    }

    /// Returns whether keys and values are both in layers, and those of a position lie side by side.
    pub fn is_layered_pair(self) -> bool {
        self.keys.is_layered() && self.values.is_layered()
    }

    /// Returns the bytes of the lower layer of a key and a value of d channels; 0 for rows that are not in layers.
    pub fn lower_bytes(self, d: usize) -> usize {
        let lower = |format: RowFormat, part| {
            let [_, lower] = format.arrays(part, d);
            lower.filter(|_| format.is_layered()).unwrap_or(0)
        };
        lower(self.keys, Part::Keys) + lower(self.values, Part::Values)
    }

    /// Returns whether keys or values pass a map before they are rounded.
    pub fn maps_rows(self) -> bool {
        self.keys.maps_rows() || self.values.maps_rows()
    }

    /// Returns whether rows are read back as they were first stored.
    pub fn keeps_rows(self) -> bool {
        self.keys.keeps_rows() && self.values.keeps_rows()
    }

    /// Returns whether a fork of a cache shares its rows.
    pub fn shares_rows(self) -> bool {
        self.keys.shares_rows() && self.values.shares_rows()
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (keys, values) = (self.keys.as_str(), self.values.as_str());
        if keys == values {
            f.write_str(keys)
        } else {
            write!(f, "k={keys},v={values}")
        }
    }
}

impl fmt::Debug for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for KvType {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for KvType {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let unknown = || serde::de::Error::custom(format!("unknown cache type `{text}`"));
        Self::named(&text).ok_or_else(unknown)
    }
}

impl From<Float> for KvType {
    fn from(float: Float) -> Self {
        Self::both(float.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_form_names_both_formats_or_one() {
        for format in FORMATS {
            assert_eq!(KvType::named(format.as_str()), Some(KvType::both(*format)));
            assert_eq!(KvType::both(*format).to_string(), format.as_str());
        }
        let mixed = KvType {
            keys: RowFormat::F16,
            values: RowFormat::TWO_BIT,
        };
        assert_eq!(mixed.to_string(), "k=f16,v=2bit");
        assert_eq!(KvType::named("k=f16,v=2bit"), Some(mixed));
        assert_eq!(KvType::named("v=2bit,k=f16"), Some(mixed));
        assert_eq!(KvType::named("k=f16,v=f16"), Some(KvType::F16));
        for wrong in [
            "",
            "f64",
            "k=f16",
            "k=f16,k=f16",
            "k=f16,v=2bit,v=2bit",
            "q=f16,v=f16",
        ] {
            assert_eq!(KvType::named(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_position_takes_the_bytes_of_its_arrays() {
        assert_eq!(KvType::TWO_BIT.bytes_per_position(64), 56);
        assert_eq!(KvType::TWO_BIT.bytes_per_key(64), 32);
        assert_eq!(
            KvType::named("k=bf16,v=2bit").unwrap().bytes_per_position(64),
            128 + 24
        );
        let uncompressed = |name: &str| KvType::named(name).unwrap().uncompressed_bytes(64);
        assert_eq!(
            ["f32", "bf16", "int4", "k=f32,v=int8"].map(uncompressed),
            [512, 256, 256, 384]
        );
        assert_eq!(KvType::F32.row_arrays(10), [[Some(40), None], [Some(40), None]]);
    }
}
