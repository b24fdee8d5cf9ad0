//! What this kernel and its drivers have for memory that migrates between processors and devices, and what they lack for
//! the direct path, where a network card reads a GPU's private pages without their moving back.

use std::fs;

use super::super::Setting;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::sysfs;

/// Something of the kernel's: what it is for, its option, and a function that is there with it and with nothing else.
struct Part {
    what: &'static str,
    option: &'static str,
    function: Option<&'static str>,
}

/// What the way by migration needs, and then what the direct one needs beside it.
const PARTS: [Part; 5] = [
    Part {
        what: "on-demand paging",
        option: "CONFIG_INFINIBAND_ON_DEMAND_PAGING",
        function: Some("ib_umem_odp_get"),
    },
    Part {
        what: "page tables mirrored for devices (HMM)",
        option: "CONFIG_HMM_MIRROR",
        function: Some("hmm_range_fault"),
    },
    Part {
        what: "memory of devices as pages",
        option: "CONFIG_ZONE_DEVICE",
        function: Some("memremap_pages"),
    },
    Part { what: "device-private pages", option: "CONFIG_DEVICE_PRIVATE", function: None },
    Part { what: "peer-to-peer DMA", option: "CONFIG_PCI_P2PDMA", function: Some("pci_p2pdma_add_resource") },
];

/// Whether a part is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Is {
    There,
    Missing,
    /// Neither configuration nor symbols tell.
    Unknown,
}

pub(super) fn run(_setting: &Setting) -> Result<Finding, Broken> {
    let release = sysfs::text("/proc/sys/kernel/osrelease")?;
    let release = release.trim();
    let places = [format!("/boot/config-{release}"), format!("/lib/modules/{release}/config")];
    let config = places.iter().find_map(|place| fs::read_to_string(place).ok());
    let symbols = fs::read_to_string("/proc/kallsyms").unwrap_or_default();
    let found: Vec<(&Part, Is)> =
        PARTS.iter().map(|part| (part, is_there(part, config.as_deref(), &symbols))).collect();
    let mut claim = Claim::default();
    for (part, is) in &found {
        let word = match is {
            Is::There => "there",
            Is::Missing => "missing",
            Is::Unknown => "not known: no configuration of this kernel is at hand",
        };
        claim.seen(format!("{} ({}): {word}", part.what, part.option));
    }
    claim.seen(drivers(&sysfs::names("/sys/module")));
    claim.seen(DIRECT);
    let missing = found.iter().filter(|(_, is)| *is == Is::Missing).map(|(part, _)| part.option);
    let missing: Vec<&str> = missing.collect();
    let finding = claim.finish();
    Ok(if missing.is_empty() {
        finding
    } else {
        Finding::waived(format!("{} missing: {}", missing.join(", "), finding.reason))
    })
}

/// What no released kernel has, whatever its configuration.
const DIRECT: &str = "the direct path (get_dma_pfn_for_device, HMM_PFN_ALLOW_P2P) is in no released kernel: pages move back to \
    memory before a network card uses them";

/// Which drivers of this machine take part.
fn drivers(modules: &[String]) -> String {
    const WANTED: [(&str, &str); 4] = [
        ("mlx5_ib", "on-demand paging by hardware"),
        ("rdma_rxe", "on-demand paging by software, since Linux 6.16"),
        ("nouveau", "device-private pages"),
        ("nvidia_uvm", "pages that move into a GPU"),
    ];
    let have = WANTED.iter().filter(|(name, _)| modules.iter().any(|module| module == name));
    let have: Vec<String> = have.map(|(name, what)| format!("{name} ({what})")).collect();
    if have.is_empty() {
        "none of their drivers is loaded".to_owned()
    } else {
        format!("drivers: {}", have.join(", "))
    }
}

fn is_there(part: &Part, config: Option<&str>, symbols: &str) -> Is {
    if let Some(config) = config {
        let yes = [format!("{}=y", part.option), format!("{}=m", part.option)];
        let there = config.lines().any(|line| yes.iter().any(|yes| line == yes));
        return if there { Is::There } else { Is::Missing };
    }
    let Some(function) = part.function else { return Is::Unknown };
    if symbols.is_empty() {
        return Is::Unknown;
    }
    // `address type name [module]`
    let there = symbols.lines().any(|line| line.split_whitespace().nth(2) == Some(function));
    // A function in a module that is not loaded is not seen.
    match (there, part.function) {
        (true, _) => Is::There,
        (false, Some("ib_umem_odp_get")) => Is::Unknown,
        (false, _) => Is::Missing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYMBOLS: &str =
        "0 T hmm_range_fault\n0 t pci_p2pdma_add_resource_not\n0 T memremap_pages\t[core]\n";

    #[test]
    fn a_configuration_decides_and_else_the_symbols() {
        let [odp, hmm, zone, private, p2p] = &PARTS;
        assert_eq!(is_there(private, Some("CONFIG_DEVICE_PRIVATE=y\n"), ""), Is::There);
        assert_eq!(is_there(private, Some("# CONFIG_DEVICE_PRIVATE is not set\n"), SYMBOLS), Is::Missing);
        assert_eq!(is_there(private, None, SYMBOLS), Is::Unknown);
        assert_eq!(
            [hmm, zone, p2p, odp].map(|part| is_there(part, None, SYMBOLS)),
            [Is::There, Is::There, Is::Missing, Is::Unknown]
        );
        assert_eq!(is_there(hmm, None, ""), Is::Unknown);
    }

    #[test]
    fn drivers_that_are_loaded_are_named_with_what_they_give() {
        assert!(
            drivers(&["nouveau".into(), "rdma_rxe".into()])
                .contains("rdma_rxe (on-demand paging by software")
        );
        assert_eq!(drivers(&["ext4".into()]), "none of their drivers is loaded");
    }
}
