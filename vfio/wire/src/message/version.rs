//! The handshake: versions, and the capabilities of each side.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::wrong::{MOST_VERSION_DATA, Wrong};
use crate::bytes::Reader;
use crate::frame::MOST_FDS;

/// Most bytes of one transfer that we ever agree on: 16 MiB.
const MOST_DATA: u32 = 16 << 20;
/// Smallest useful limit, in bytes: a register's 8.
const LEAST_DATA: u64 = 8;
/// Smallest page, in bytes.
const LEAST_PAGE: u64 = 0x1000;

/// Descriptors per message that we announce: QEMU and libvfio-user refuse a peer that announces more. We accept more,
/// because one client does not check this limit.
pub(crate) const ANNOUNCED_FDS: u64 = 16;

/// `VERSION`, request or reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// Major version: 0 in all versions so far.
    pub major: u16,
    /// Minor version; a reply's is at most the request's.
    pub minor: u16,
    /// Capabilities of its sender.
    pub capabilities: Capabilities,
}

/// Capabilities that a peer announces. Unknown names are ignored; omitted ones have a default.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Capabilities {
    /// Descriptors that it takes in one message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_msg_fds: Option<u64>,
    /// Bytes that it takes in one read or write.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_data_xfer_size: Option<u64>,
    /// DMA windows at a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_dma_maps: Option<u64>,
    /// Page sizes for DMA windows, or'ed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pgsizes: Option<u64>,
    /// Migration, as older peers announce it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration: Option<MigrationPages>,
    /// A second socket for the server's requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub twin_socket: Option<TwinSocket>,
    /// Takes several writes in one message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_multiple: Option<bool>,
}

/// Parameters of older peers' migration.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MigrationPages {
    /// Bytes that one bit of a dirty bitmap stands for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pgsize: Option<u64>,
}

/// Capability: a second socket for the server's requests.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TwinSocket {
    /// Whether its sender supports it.
    pub supported: bool,
    /// Index among the message's descriptors, in a reply.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fd_index: Option<u64>,
}

/// Limits for messages to a peer, defaults filled in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Descriptors in one message.
    pub fds: usize,
    /// Bytes in one read or write.
    pub data: u32,
    /// DMA windows at a time.
    pub maps: u64,
    /// Page sizes for DMA windows, or'ed.
    pub page_sizes: u64,
    /// Several writes in one message.
    pub write_multiple: bool,
}

#[derive(Serialize, Deserialize, Default)]
#[serde(default)]
struct Text {
    #[serde(deserialize_with = "object")]
    capabilities: Capabilities,
}

/// A JSON object only: by default, serde also accepts an array of the values without their names.
fn object<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    struct Object<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Object<T> {
        type Value = T;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
            T::deserialize(MapAccessDeserializer::new(map))
        }
    }

    deserializer.deserialize_map(Object(PhantomData))
}

impl Text {
    fn parse(text: &[u8]) -> serde_json::Result<Self> {
        let mut deserializer = serde_json::Deserializer::from_slice(text);
        let text = object(&mut deserializer)?;
        deserializer.end().map(|()| text)
    }
}

impl Version {
    /// Decodes a request or a reply. No text at all means all defaults.
    ///
    /// # Errors
    /// [`Wrong`] when it is too short, or its text is too long, does not end with its only NUL, or is no JSON object
    /// as documented.
    pub fn decode(body: &[u8]) -> Result<Self, Wrong> {
        let mut reader = Reader::new("version", body);
        let (major, minor) = (reader.u16()?, reader.u16()?);
        let data = reader.rest();
        let text = match data.split_last() {
            None => Text::default(),
            Some((0, text)) if data.len() <= MOST_VERSION_DATA as usize => {
                Text::parse(text).map_err(|_| Wrong::Version)?
            }
            Some(_) => return Err(Wrong::Version),
        };
        Ok(Self { major, minor, capabilities: text.capabilities })
    }

    /// Appends the encoding to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend([self.major, self.minor].into_iter().flat_map(u16::to_le_bytes));
        let text = Text { capabilities: self.capabilities.clone() };
        // Numbers and truth values under fixed names: there is nothing in it that could fail.
        out.extend(serde_json::to_vec(&text).unwrap_or_default());
        out.push(0);
    }
}

impl Capabilities {
    /// Limits for messages to a peer with these capabilities.
    ///
    /// # Errors
    /// [`Wrong`] when so little data fits a message that not even a register does, or for a page size that no machine has.
    pub fn limits(&self) -> Result<Limits, Wrong> {
        let data = self.max_data_xfer_size.unwrap_or(1 << 20);
        if data < LEAST_DATA {
            return Err(Wrong::Value { what: "max_data_xfer_size", value: data, rule: "8 at least" });
        }
        let page = |size: u64| size >= LEAST_PAGE && size.is_power_of_two();
        let migration = self.migration.as_ref().and_then(|pages| pages.pgsize);
        if let Some(value) = migration.filter(|size| !page(*size)) {
            let rule = "a power of two of 0x1000 or more";
            return Err(Wrong::Value { what: "page size of migration", value, rule });
        }
        if let Some(value) = self.pgsizes.filter(|sizes| *sizes < LEAST_PAGE) {
            let rule = "it names a page of 0x1000 bytes or more";
            return Err(Wrong::Value { what: "pgsizes", value, rule });
        }
        Ok(Limits {
            fds: usize::try_from(self.max_msg_fds.unwrap_or(1)).unwrap_or(MOST_FDS).min(MOST_FDS),
            data: u32::try_from(data).unwrap_or(MOST_DATA).min(MOST_DATA),
            maps: self.max_dma_maps.unwrap_or(0xffff),
            page_sizes: self.pgsizes.unwrap_or(0x1000),
            write_multiple: self.write_multiple.unwrap_or(false),
        })
    }
}
