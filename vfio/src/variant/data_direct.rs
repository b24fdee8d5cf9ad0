//! Data Direct: a second PCI function of a ConnectX-8, in the GPU's tree, by which it reaches GPU memory without passing
//! the CPU. Both functions go to one guest, or neither does any good.
//!
//! The guest's mlx5 driver selects the partner by keyword `VU` of its vital product data: the network function's
//! firmware names the same value. The host cannot query that firmware. It finds the pair by keyword `V3`, a number of
//! the card that both functions have, as rdma-core's `rdma_topo` does.

use egm_address::{Gpa, PciAddress};
use serde::{Deserialize, Serialize};

use crate::host::{HostBar, HostBarKind};

/// Why vital product data cannot be read (PCI Local Bus 3.0 appendix I).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VpdError {
    /// A resource that ends behind the data.
    #[error("vital product data: the resource at {at:#x} ends behind the {length:#x} bytes that there are")]
    Resource {
        /// Offset of its tag.
        at: usize,
        /// Bytes of vital product data that were read.
        length: usize,
    },
    /// A keyword that ends behind its resource.
    #[error("vital product data: the keyword at {at:#x} ends behind its resource")]
    Keyword {
        /// Offset of the keyword.
        at: usize,
    },
}

const LARGE: u8 = 0x80;
const READ_ONLY: u8 = 0x90;
const END: u8 = 0x0f << 3;

/// Value of a read-only keyword, `None` if there is no such keyword.
///
/// # Errors
/// [`VpdError`] when the data are cut short before it is found.
pub fn keyword<'a>(vpd: &'a [u8], name: &[u8; 2]) -> Result<Option<&'a [u8]>, VpdError> {
    let mut rest = vpd;
    // Each step takes a byte at least.
    while let Some((tag, tail)) = rest.split_first() {
        let cut = VpdError::Resource { at: offset(vpd, rest), length: vpd.len() };
        if tag & !7 == END {
            break;
        }
        let (size, body) = match tail {
            [low, high, body @ ..] if tag & LARGE != 0 => (u16::from_le_bytes([*low, *high]), body),
            _ if tag & LARGE != 0 => return Err(cut),
            body => (u16::from(tag & 7), body),
        };
        let (resource, after) = body.split_at_checked(usize::from(size)).ok_or(cut)?;
        if *tag == READ_ONLY
            && let Some(value) = in_resource(vpd, resource, name)?
        {
            return Ok(Some(value));
        }
        rest = after;
    }
    Ok(None)
}

fn in_resource<'a>(vpd: &[u8], resource: &'a [u8], name: &[u8; 2]) -> Result<Option<&'a [u8]>, VpdError> {
    let mut rest = resource;
    while let [first, second, size, tail @ ..] = rest {
        let cut = VpdError::Keyword { at: offset(vpd, rest) };
        let (value, after) = tail.split_at_checked(usize::from(*size)).ok_or(cut)?;
        if [*first, *second] == *name {
            return Ok(Some(value));
        }
        rest = after;
    }
    Ok(None)
}

/// Offset of `tail`, which lies within `whole`: for messages.
fn offset(whole: &[u8], tail: &[u8]) -> usize {
    (tail.as_ptr() as usize).saturating_sub(whole.as_ptr() as usize)
}

/// Identification of a function's card, from its vital product data.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Card {
    /// `V3`: the card, the same in all of its functions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub number: Option<String>,
    /// `VU`: the value that the guest's driver compares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unique: Option<String>,
    /// Reason why the rest could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl Card {
    /// Parses `vpd`, the content of the host's file of that name.
    pub fn of(vpd: &[u8]) -> Self {
        let text = |value: &[u8]| value.escape_ascii().to_string();
        let field = |name| keyword(vpd, name).map(|value| value.map(text));
        match field(b"V3").and_then(|number| Ok((number, field(b"VU")?))) {
            Ok((number, unique)) => Self { number, unique, problem: None },
            Err(error) => Self { problem: Some(error.to_string()), ..Self::default() },
        }
    }
}

/// A function that may be part of a pair.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// Address on the host.
    pub address: PciAddress,
    /// Whether it is a Data Direct function rather than a network function.
    pub is_data_direct: bool,
    /// Its card; `None` when its vital product data cannot be read.
    pub card: Option<&'a Card>,
}

/// A Data Direct function and the network functions of its card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pairing {
    /// Address of the Data Direct function.
    pub data_direct: PciAddress,
    /// The network functions of its card, in the order given; empty when none is there.
    pub network: Vec<PciAddress>,
    /// Why the guest's driver would not find it.
    pub problem: Option<PairingProblem>,
}

/// Why a Data Direct function cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum PairingProblem {
    /// Its data cannot be read, or make no sense.
    #[error("its vital product data cannot be read ({0}): update the card's firmware")]
    Vpd(String),
    /// A keyword is missing.
    #[error("its vital product data have no keyword {}: update the card's firmware", name.escape_ascii())]
    NoKeyword { name: [u8; 2] },
    /// The guest has no network function of its card.
    #[error("the network function of its card is not given to this guest: give it both or neither")]
    Alone,
}

/// Pairs the Data Direct functions among `functions` with the network functions of the same card.
pub fn pair(functions: &[Candidate<'_>]) -> Vec<Pairing> {
    let partners = functions.iter().filter(|function| function.is_data_direct);
    let pairing = |partner: &Candidate<'_>| {
        let (network, problem) = match network(partner, functions) {
            Ok(network) => (network, None),
            Err(problem) => (Vec::new(), Some(problem)),
        };
        Pairing { data_direct: partner.address, network, problem }
    };
    partners.map(pairing).collect()
}

fn network(partner: &Candidate<'_>, functions: &[Candidate<'_>]) -> Result<Vec<PciAddress>, PairingProblem> {
    let card = partner.card.ok_or_else(|| PairingProblem::Vpd("no vpd file".to_owned()))?;
    if let Some(problem) = &card.problem {
        return Err(PairingProblem::Vpd(problem.clone()));
    }
    card.unique.as_ref().ok_or(PairingProblem::NoKeyword { name: *b"VU" })?;
    let number = card.number.as_ref().ok_or(PairingProblem::NoKeyword { name: *b"V3" })?;
    let same = |function: &&Candidate<'_>| {
        !function.is_data_direct && function.card.is_some_and(|card| card.number.as_ref() == Some(number))
    };
    let network: Vec<PciAddress> = functions.iter().filter(same).map(|function| function.address).collect();
    if network.is_empty() { Err(PairingProblem::Alone) } else { Ok(network) }
}

/// Required address of a GPU's BAR in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacementWish {
    /// Number of the base address register, 0 to 5.
    pub bar: u8,
    /// The guest physical address that it must have: the host's.
    pub address: Gpa,
    /// Reason of this address, for people.
    pub reason: &'static str,
}

/// Requirement of Data Direct on the BARs of the GPU that it reaches: its driver hands out addresses of the GPU's
/// second BAR ("BAR1") that no IOMMU translates, so guest and host must have that BAR at the same address. `None` if
/// the host gave it no address.
pub fn placement(gpu: &[HostBar]) -> Option<PlacementWish> {
    let prefetchable = |bar: &&HostBar| bar.kind == HostBarKind::Memory64Prefetchable;
    let aperture = gpu.iter().skip(1).find(prefetchable).filter(|bar| bar.start != 0)?;
    let reason = "Data Direct uses the host's addresses of this BAR";
    Some(PlacementWish { bar: aperture.index, address: Gpa::new(aperture.start), reason })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn vpd(keywords: &[(&str, &str)]) -> Vec<u8> {
        let mut fields = Vec::new();
        for (name, value) in keywords {
            fields.extend(name.as_bytes());
            fields.push(u8::try_from(value.len()).unwrap());
            fields.extend(value.as_bytes());
        }
        let mut vpd = vec![0x82, 4, 0];
        vpd.extend(b"CX-8");
        vpd.push(READ_ONLY);
        vpd.extend(u16::try_from(fields.len()).unwrap().to_le_bytes());
        vpd.extend(fields);
        vpd.push(END);
        vpd
    }

    fn at(address: &str) -> PciAddress {
        address.parse().unwrap()
    }

    #[test]
    fn a_keyword_is_found_behind_others_and_before_the_end() {
        let vpd = vpd(&[("PN", "900-9X81E"), ("V3", "a1b2"), ("VU", "MT2500XZ")]);
        assert_eq!(keyword(&vpd, b"VU"), Ok(Some(b"MT2500XZ".as_slice())));
        assert_eq!(keyword(&vpd, b"RV"), Ok(None));
        assert_eq!(
            keyword(&vpd[..vpd.len() - 3], b"VU"),
            Err(VpdError::Resource { at: 7, length: vpd.len() - 3 })
        );
        assert_eq!(keyword(&[READ_ONLY, 4, 0, b'V', b'U', 9, 1], b"VU"), Err(VpdError::Keyword { at: 3 }));
        assert_eq!(keyword(&[0xff; 64], b"VU").unwrap_err(), VpdError::Resource { at: 0, length: 64 });
    }

    #[test]
    fn functions_of_one_card_are_a_pair() {
        let (one, other) =
            (Card::of(&vpd(&[("V3", "one"), ("VU", "u")])), Card::of(&vpd(&[("V3", "other")])));
        let candidate = |address, is_data_direct, card| Candidate {
            address: at(address),
            is_data_direct,
            card: Some(card),
        };
        let functions = [
            candidate("0000:03:00.0", false, &one),
            candidate("0000:03:00.1", false, &one),
            candidate("0002:03:00.0", false, &other),
            candidate("0009:02:00.0", true, &one),
        ];
        let pairs = pair(&functions);
        assert_eq!(pairs.len(), 1);
        assert_eq!(pairs[0].network, [at("0000:03:00.0"), at("0000:03:00.1")]);
        assert_eq!(pairs[0].problem, None);
        let alone = pair(&functions[2..]);
        assert_eq!(alone[0].problem, Some(PairingProblem::Alone));
    }

    #[test]
    fn a_partner_that_the_driver_would_not_find_states_why() {
        let problem = |vpd: &[u8]| {
            let card = Card::of(vpd);
            let alone = Candidate { address: at("0009:02:00.0"), is_data_direct: true, card: Some(&card) };
            pair(&[alone])[0].problem.clone().unwrap().to_string()
        };
        assert_eq!(
            problem(&vpd(&[("V3", "one")])),
            "its vital product data have no keyword VU: update the card's firmware"
        );
        assert!(problem(&[0xff; 64]).contains("the resource at 0x0 ends behind the 0x40 bytes"));
    }

    #[test]
    fn the_second_bar_of_a_gpu_is_requested_where_the_host_has_it() {
        let kind = HostBarKind::Memory64Prefetchable;
        let bar = |index, size, start| HostBar { index, kind, size, start };
        let bars = [bar(0, 16 << 20, 0x1000), bar(2, 256 << 30, 0x2000_0000_0000), bar(4, 32 << 20, 0x3000)];
        let wish = placement(&bars).unwrap();
        assert_eq!((wish.bar, wish.address), (2, Gpa::new(0x2000_0000_0000)));
        assert_eq!(placement(&bars[..1]), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_to_an_end(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            if let Ok(Some(value)) = keyword(&bytes, b"VU") {
                prop_assert!(bytes.windows(value.len() + 3).any(|w| w[..2] == *b"VU" && w[3..] == *value));
            }
        }
    }
}
