//! safetensors files as the harness takes them apart and puts them together, apart from kvsmith's own writer.

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::Input;

/// The parts of a safetensors file.
#[derive(Clone, Default)]
pub struct TensorFile {
    /// kvsmith's JSON.
    pub metadata: Option<Value>,
    /// The tensors.
    pub tensors: Vec<Tensor>,
}

/// A tensor; the shape need not fit the data.
#[derive(Clone)]
pub struct Tensor {
    /// Name.
    pub name: String,
    /// Element type, as the format names it.
    pub dtype: String,
    /// Sizes of the axes.
    pub shape: Vec<u64>,
    /// Little-endian data.
    pub data: Vec<u8>,
}

/// Zero, the least number, one, the largest, infinity, a NaN, minus zero and minus infinity, as f16.
const HALVES: [u64; 8] = [0x0000, 0x0001, 0x3c00, 0x7bff, 0x7c00, 0x7e00, 0x8000, 0xfc00];

/// Where a manifest has its own digest.
const SEAL: &str = "manifest_sha256";

/// Formats a digest.
pub fn digest(bytes: &[u8]) -> String {
    let bytes = Sha256::digest(bytes);
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Gives an object the digest of the rest of its text as member `key`.
pub fn seal(object: &mut Value, key: &str) {
    if let Value::Object(map) = object {
        map.remove(key);
        let digest = digest(json!(map).to_string().as_bytes());
        map.insert(key.to_string(), json!(digest));
    }
}

/// Returns the bytes of an element; 0 for types that kvsmith does not write.
fn width(dtype: &str) -> usize {
    match dtype {
        "F64" | "U64" | "I64" => 8,
        "F32" | "U32" | "I32" => 4,
        "F16" | "BF16" | "U16" => 2,
        "U8" | "I8" | "BOOL" => 1,
        _ => 0,
    }
}

impl TensorFile {
    /// Takes a valid file apart.
    pub fn read(bytes: &[u8]) -> Self {
        let len = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
        let (header, data) = bytes[8..].split_at(len);
        let mut header: Map<String, Value> = serde_json::from_slice(header).expect("a header");
        let metadata = header
            .remove("__metadata__")
            .map(|m| serde_json::from_str(m["kvsmith"].as_str().expect("text")).expect("a manifest"));
        let tensor = |(name, entry): (String, Value)| {
            let at = |i: usize| entry["data_offsets"][i].as_u64().expect("an offset") as usize;
            Tensor {
                name,
                dtype: entry["dtype"].as_str().expect("a type").to_string(),
                shape: serde_json::from_value(entry["shape"].clone()).expect("a shape"),
                data: data[at(0)..at(1)].to_vec(),
            }
        };
        Self {
            metadata,
            tensors: header.into_iter().map(tensor).collect(),
        }
    }

    /// Puts the file together in kvsmith's canonical form.
    pub fn bytes(&self) -> Vec<u8> {
        let mut order: Vec<&Tensor> = self.tensors.iter().collect();
        order.sort_by_key(|t| (std::cmp::Reverse(width(&t.dtype)), &t.name));
        let mut header = Map::new();
        if let Some(metadata) = &self.metadata {
            header.insert("__metadata__".into(), json!({ "kvsmith": metadata.to_string() }));
        }
        let mut data = Vec::new();
        for t in order {
            let start = data.len();
            data.extend(&t.data);
            let entry = json!({ "dtype": t.dtype, "shape": t.shape, "data_offsets": [start, data.len()] });
            header.insert(t.name.clone(), entry);
        }
        let mut text = json!(header).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        [&(text.len() as u64).to_le_bytes()[..], &text, &data].concat()
    }

    /// Returns the digest of a tensor's data, if there is such a tensor.
    pub fn digest(&self, name: &str) -> Option<Value> {
        let tensor = self.tensors.iter().find(|t| t.name == name);
        tensor.map(|t| json!(digest(&t.data)))
    }

    /// Makes the digests right that the manifest has of the tensors, for the file or for each section, and then the
    /// manifest's own, if it has one.
    pub fn reseal(&mut self) {
        let Some(mut manifest) = self.metadata.take() else {
            return;
        };
        self.right_digests(&mut manifest);
        let sections = manifest.get_mut("sections").and_then(Value::as_object_mut);
        sections
            .into_iter()
            .flat_map(Map::values_mut)
            .for_each(|section| self.right_digests(section));
        if manifest.get(SEAL).is_some() {
            seal(&mut manifest, SEAL);
        }
        self.metadata = Some(manifest);
    }

    fn right_digests(&self, of: &mut Value) {
        let digests = of.get_mut("sha256").and_then(Value::as_object_mut);
        for (name, digest) in digests.into_iter().flatten() {
            if let Some(right) = self.digest(name) {
                *digest = right;
            }
        }
    }

    /// Changes one tensor as the input says.
    pub fn edit(&mut self, input: &mut Input) {
        let at = input.below(self.tensors.len());
        let how = input.byte();
        if self.tensors.is_empty() {
            return;
        }
        match how % 16 {
            0 => drop(self.tensors.remove(at)),
            1 => {
                let mut copy = self.tensors[at].clone();
                copy.name = input.text();
                self.tensors.push(copy);
            }
            _ => self.tensors[at].edit(how, input),
        }
    }
}

impl Tensor {
    fn edit(&mut self, how: u8, input: &mut Input) {
        const TYPES: [&str; 9] = ["F64", "U64", "I64", "F32", "U32", "F16", "BF16", "U8", "F8_E4M3"];
        match how % 16 {
            2 => self.dtype = TYPES[usize::from(input.byte()) % TYPES.len()].to_string(),
            3 => self.shape = (0..input.byte() % 6).map(|_| input.size()).collect(),
            4 | 5 => {
                let axis = input.below(self.shape.len());
                if let Some(axis) = self.shape.get_mut(axis) {
                    *axis = input.size();
                }
                self.fit(how % 16 == 4);
            }
            6 => self.data.truncate(input.below(65_536)),
            _ => self.put(input),
        }
    }

    /// Gives the data the length that the shape asks for, if it is small.
    fn fit(&mut self, wanted: bool) {
        let mut axes = self.shape.iter();
        let len = axes.try_fold(width(&self.dtype) as u64, |n, axis| n.checked_mul(*axis));
        if let Some(len) = len.filter(|len| wanted && *len <= 1 << 17) {
            self.data.resize(len as usize, 0);
        }
    }

    /// Overwrites some elements.
    fn put(&mut self, input: &mut Input) {
        let width = width(&self.dtype).max(1);
        let at = input.below(self.data.len() / width) * width;
        let x = match input.byte() % 8 {
            0 => f64::NAN,
            1 => f64::INFINITY,
            2 => f64::NEG_INFINITY,
            _ => input.float(),
        };
        let (integer, raw) = (input.size(), input.number());
        let bytes = match (input.byte() % 4, self.dtype.as_str()) {
            (0, _) => raw.to_le_bytes(),
            (_, "F64") => x.to_le_bytes(),
            (_, "F32") => u64::from((x as f32).to_bits()).to_le_bytes(),
            (_, "F16") => HALVES[integer as usize % HALVES.len()].to_le_bytes(),
            _ => integer.to_le_bytes(),
        };
        let many = usize::from(input.byte() >> 4).max(1);
        for element in self.data[at..].chunks_exact_mut(width).take(many) {
            element.copy_from_slice(&bytes[..width]);
        }
    }
}
