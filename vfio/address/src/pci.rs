//! PCI function addresses: `0009:01:00.0`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::Quoted;

/// Segment, bus, device and function of a PCI function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    segment: u16,
    bus: u8,
    device: u8,
    function: u8,
}

/// Why a text or four numbers are not a PCI address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum PciAddressError {
    /// Not of the form `SSSS:BB:DD.F`.
    #[error(
        "{} is not a PCI address: write segment:bus:device.function in hexadecimal, for instance \"0009:01:00.0\"",
        Quoted(.0)
    )]
    Form(String),
    /// Device above 31 or function above 7 (PCI Express Base 2.2.6.2).
    #[error(
        "PCI address {bus:02x}:{device:02x}.{function:x}: the device is at most 1f, the function at most 7"
    )]
    Range { bus: u8, device: u8, function: u8 },
}

impl PciAddress {
    /// The function at these numbers.
    ///
    /// # Errors
    /// [`PciAddressError::Range`] when `device` exceeds 31 or `function` exceeds 7.
    pub const fn new(segment: u16, bus: u8, device: u8, function: u8) -> Result<Self, PciAddressError> {
        if device > 31 || function > 7 {
            return Err(PciAddressError::Range { bus, device, function });
        }
        Ok(Self { segment, bus, device, function })
    }

    /// Number of the PCI segment group, which Linux calls a domain.
    pub const fn segment(self) -> u16 {
        self.segment
    }
    /// Bus number, 0 to 255, within the segment group.
    pub const fn bus(self) -> u8 {
        self.bus
    }
    /// Device number, 0 to 31.
    pub const fn device(self) -> u8 {
        self.device
    }
    /// Function number, 0 to 7.
    pub const fn function(self) -> u8 {
        self.function
    }
    /// Device in bits 7..3, function in bits 2..0.
    pub const fn devfn(self) -> u8 {
        self.device << 3 | self.function
    }
}

impl FromStr for PciAddress {
    type Err = PciAddressError;
    fn from_str(text: &str) -> Result<Self, PciAddressError> {
        let form = || PciAddressError::Form(text.to_owned());
        let hex = |part: &str, most: usize| {
            let digits =
                !part.is_empty() && part.len() <= most && part.bytes().all(|b| b.is_ascii_hexdigit());
            if digits { u16::from_str_radix(part, 16).map_err(|_| form()) } else { Err(form()) }
        };
        let byte = |part: &str, most| hex(part, most).and_then(|n| u8::try_from(n).map_err(|_| form()));
        let (rest, function) = text.trim().rsplit_once('.').ok_or_else(form)?;
        let (rest, device) = rest.rsplit_once(':').ok_or_else(form)?;
        let (segment, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
        Self::new(hex(segment, 4)?, byte(bus, 2)?, byte(device, 2)?, byte(function, 1)?)
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { segment, bus, device, function } = self;
        f.pad(&format!("{segment:04x}:{bus:02x}:{device:02x}.{function:x}"))
    }
}

impl Serialize for PciAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
impl<'de> Deserialize<'de> for PciAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn addresses_are_read_as_lspci_prints_them() {
        let address: PciAddress = "0009:05:1f.7".parse().unwrap();
        assert_eq!((address.segment(), address.bus(), address.device(), address.function()), (9, 5, 31, 7));
        assert_eq!(address.devfn(), 0xff);
        assert_eq!("65:00.0".parse::<PciAddress>().unwrap().to_string(), "0000:65:00.0");
    }

    #[test]
    fn a_wrong_address_is_refused() {
        for text in [
            "",
            "1",
            "0:0",
            "0000:00:20.0",
            "0000:00:00.8",
            "+1:00.0",
            "0000:100:00.0",
            "0000:00:00.0.0",
            "001:00.0",
            "00:001.0",
            "00000:00:00.0",
        ] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn printing_and_reading_is_the_identity(s: u16, b: u8, d in 0u8..32, f in 0u8..8) {
            let address = PciAddress::new(s, b, d, f).unwrap();
            prop_assert_eq!(address.to_string().parse::<PciAddress>().unwrap(), address);
        }
    }
}
