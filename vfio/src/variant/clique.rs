//! NVIDIA's virtual P2P approval: a capability with which a hypervisor informs the guest's driver which GPUs reach each
//! other over PCI Express. It changes no mapping; it is a promise, and a broken promise ends in hanging copies.
//!
//! Layout: qemu-devel, "NVIDIA GPUDirect P2P approval", 2017-08 and 2023-06; open-gpu-kernel-modules `nvpcie.h`.

use std::fmt;

use egm_address::PciAddress;

use crate::pci::shadow::AddedCapability;

/// Number of a clique, 0 to 15: GPUs with the same number reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Clique(u8);

/// Number of cliques: the field has four bits.
const CLIQUES: u8 = 16;

impl Clique {
    /// Clique `number`, if there is one.
    pub fn new(number: u8) -> Option<Self> {
        (number < CLIQUES).then_some(Self(number))
    }

    /// Number of the clique, 0 to 15.
    pub fn number(self) -> u8 {
        self.0
    }

    /// The capability that announces it. It was at 0xc8 first, and moved to 0xd4 when Turing had MSI-X there; the
    /// driver walks the list, so any offset will do.
    pub fn capability(self) -> AddedCapability {
        const VENDOR_SPECIFIC: u8 = 0x09;
        const LENGTH: u8 = 8;
        AddedCapability {
            name: "P2P approval",
            preferred: &[0xc8, 0xd4],
            id: VENDOR_SPECIFIC,
            // Version 0 in the low three bits of the clique's byte.
            body: vec![LENGTH, b'P', b'2', b'P', self.0 << 3, 0],
            reason: "the driver trusts no emulated switch: this marks the GPUs that reach each other",
        }
    }
}

impl fmt::Display for Clique {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Path between two GPUs of the host, for accesses of one to the other's BARs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// Switches that let them through without the root complex.
    Switch,
    /// The same NVLink fabric, which the driver prefers.
    Fabric,
    /// The root complex: whether it forwards them, and how fast, depends on the platform and is not documented.
    Root,
    /// Nothing: a BAR that is not mapped for the other, or access control that refuses.
    None,
}

impl Path {
    fn is_good(self) -> bool {
        matches!(self, Self::Switch | Self::Fabric)
    }
}

/// Cliques of GPUs, with warnings.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cliques {
    /// By GPU, in the order given; `None` for a GPU without partners.
    pub of: Vec<Option<Clique>>,
    /// Warnings for the operator.
    pub warnings: Vec<CliqueWarning>,
}

/// A set of cliques that works less well than it appears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CliqueWarning {
    /// Two GPUs are announced as reaching each other and are not known to.
    Lie {
        /// Clique that both GPUs are in.
        clique: Clique,
        /// The earlier GPU in the order given.
        first: PciAddress,
        /// The later GPU in the order given.
        second: PciAddress,
        /// Path in a direction that is not known to work: [`Path::Root`] or [`Path::None`].
        path: Path,
    },
    /// Two GPUs reach each other, but their cliques differ: a GPU is in one clique, and other members of it do not
    /// reach both.
    Apart {
        /// The earlier GPU in the order given.
        first: PciAddress,
        /// The later GPU in the order given.
        second: PciAddress,
    },
    /// There are more groups than numbers.
    Exhausted {
        /// First GPU of a group without a number.
        first: PciAddress,
    },
}

impl fmt::Display for CliqueWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lie { clique, first, second, path } => {
                let why = match path {
                    Path::Root => {
                        "only the root complex is between them, and not every one forwards peer accesses"
                    }
                    Path::None => {
                        "neither reaches the other's BARs, so that copies between them would fail or hang"
                    }
                    Path::Switch | Path::Fabric => "they reach each other",
                };
                write!(
                    f,
                    "GPUs {first} and {second} are both in clique {clique}: {why}; give them different cliques"
                )
            }
            Self::Apart { first, second } => write!(
                f,
                "GPUs {first} and {second} reach each other but are in different cliques: copies between them take \
                 the way through memory"
            ),
            Self::Exhausted { first } => {
                write!(f, "GPU {first} and those that it reaches get no clique: all {CLIQUES} are taken")
            }
        }
    }
}

/// Numbers the groups of `gpus` in which all reach each other, in the order of their first members. A GPU joins the
/// first group that it fits.
pub fn number(gpus: &[PciAddress], path: impl Fn(PciAddress, PciAddress) -> Path) -> Cliques {
    let good = |a: PciAddress, b: PciAddress| path(a, b).is_good() && path(b, a).is_good();
    let mut groups: Vec<Vec<PciAddress>> = Vec::new();
    for gpu in gpus {
        match groups.iter_mut().find(|group| group.iter().all(|member| good(*member, *gpu))) {
            Some(group) => group.push(*gpu),
            None => groups.push(vec![*gpu]),
        }
    }
    groups.retain(|group| group.len() > 1);
    let mut warnings = Vec::new();
    let numbered = |gpu: &PciAddress| {
        let group = groups.iter().position(|group| group.contains(gpu))?;
        Clique::new(u8::try_from(group).ok()?)
    };
    let of: Vec<Option<Clique>> = gpus.iter().map(numbered).collect();
    let beyond = groups.iter().skip(usize::from(CLIQUES)).filter_map(|group| group.first());
    warnings.extend(beyond.map(|first| CliqueWarning::Exhausted { first: *first }));
    let apart = pairs(gpus, &of).filter(|((a, of_a), (b, of_b))| of_a != of_b && good(*a, *b));
    warnings.extend(apart.map(|((first, _), (second, _))| CliqueWarning::Apart { first, second }));
    Cliques { of, warnings }
}

/// Checks cliques that an operator chose; `of` has them by GPU, in the order of `gpus`.
pub fn judge(
    gpus: &[PciAddress],
    of: &[Option<Clique>],
    path: impl Fn(PciAddress, PciAddress) -> Path,
) -> Vec<CliqueWarning> {
    let lie = |((first, clique), (second, other)): (Member, Member)| {
        let clique = clique.filter(|_| clique == other)?;
        let bad = [path(first, second), path(second, first)].into_iter().find(|path| !path.is_good());
        bad.map(|path| CliqueWarning::Lie { clique, first, second, path })
    };
    pairs(gpus, of).filter_map(lie).collect()
}

type Member = (PciAddress, Option<Clique>);

/// Every pair of GPUs, once.
fn pairs(gpus: &[PciAddress], of: &[Option<Clique>]) -> impl Iterator<Item = (Member, Member)> {
    let members: Vec<Member> = gpus.iter().copied().zip(of.iter().copied()).collect();
    (0..members.len()).flat_map(move |index| {
        let mut rest = members.iter().copied().skip(index).collect::<Vec<_>>().into_iter();
        let first = rest.next();
        rest.filter_map(move |second| Some((first?, second)))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn gpus(count: u8) -> Vec<PciAddress> {
        (0..count).map(|bus| format!("0000:{:02x}:00.0", bus + 1).parse().unwrap()).collect()
    }

    fn numbers(cliques: &Cliques) -> Vec<Option<u8>> {
        cliques.of.iter().map(|clique| clique.map(Clique::number)).collect()
    }

    /// DW0 0x5008_NN09 and DW1 0x0000_5032 | clique << 19, without id and link.
    #[test]
    fn the_capability_has_the_bytes_that_the_driver_looks_for() {
        for number in 0..CLIQUES {
            let added = Clique::new(number).unwrap().capability();
            let mut bytes = vec![added.id, 0];
            bytes.extend(&added.body);
            let words = [&bytes[..4], &bytes[4..]].map(|word| u32::from_le_bytes(word.try_into().unwrap()));
            assert_eq!(words, [0x5008_0009, 0x5032 | u32::from(number) << 19]);
        }
        assert_eq!(Clique::new(16), None);
    }

    #[test]
    fn gpus_under_one_switch_share_a_clique() {
        let gpus = gpus(5);
        let path = |a: PciAddress, b: PciAddress| {
            let switch = |gpu| gpus.iter().position(|g| *g == gpu).unwrap() / 2;
            if switch(a) == switch(b) { Path::Switch } else { Path::Root }
        };
        let cliques = number(&gpus, path);
        assert_eq!(numbers(&cliques), [Some(0), Some(0), Some(1), Some(1), None], "the last is alone");
        assert_eq!(cliques.warnings, []);
    }

    #[test]
    fn a_wrong_clique_of_an_operator_is_noted() {
        let gpus = gpus(3);
        let path = |a: PciAddress, _: PciAddress| if a == gpus[2] { Path::None } else { Path::Switch };
        let all = vec![Clique::new(7); 3];
        let warnings = judge(&gpus, &all, path);
        assert_eq!(warnings.len(), 2, "one way is not enough: {warnings:?}");
        let text = warnings[0].to_string();
        assert!(
            text.starts_with("GPUs 0000:01:00.0 and 0000:03:00.0 are both in clique 7: neither"),
            "{text}"
        );
        assert_eq!(judge(&gpus, &[Clique::new(7), Clique::new(7), None], path), []);
    }

    #[test]
    fn reaching_each_other_is_not_always_transitive() {
        let gpus = gpus(3);
        let ends = |a: PciAddress, b: PciAddress| a != gpus[1] && b != gpus[1];
        let cliques = number(&gpus, |a, b| if ends(a, b) { Path::None } else { Path::Switch });
        assert_eq!(numbers(&cliques), [Some(0), Some(0), None]);
        assert_eq!(cliques.warnings, [CliqueWarning::Apart { first: gpus[1], second: gpus[2] }]);
    }

    #[test]
    fn the_seventeenth_group_gets_no_number() {
        let gpus = gpus(34);
        let group = |gpu| gpus.iter().position(|g| *g == gpu).unwrap() / 2;
        let cliques = number(&gpus, |a, b| if group(a) == group(b) { Path::Fabric } else { Path::None });
        assert_eq!(numbers(&cliques)[31..], [Some(15), None, None]);
        assert_eq!(cliques.warnings, [CliqueWarning::Exhausted { first: gpus[32] }]);
    }

    proptest! {
        #[test]
        fn automatic_cliques_never_lie(links in prop::collection::vec(any::<bool>(), 64)) {
            let gpus = gpus(8);
            let index = |gpu| gpus.iter().position(|g| *g == gpu).unwrap();
            let path = |a, b| if links[index(a) * 8 + index(b)] { Path::Switch } else { Path::None };
            let cliques = number(&gpus, path);
            prop_assert_eq!(judge(&gpus, &cliques.of, path), []);
        }
    }
}
