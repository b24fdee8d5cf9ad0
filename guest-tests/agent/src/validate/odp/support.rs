//! What this kernel and its drivers have for memory that migrates between processors and devices, and what they lack for
//! the direct path, where a network card reads a GPU's private pages without their moving back.

use std::fs;

use super::super::Setting;
use crate::error::Broken;
use crate::finding::Finding;
use crate::kernel::{Config, PARTS, Part};
use crate::tree::Tree;

/// Whether a part is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Is {
    There,
    Missing,
    /// Neither configuration nor symbols tell.
    Unknown,
}

pub(super) fn run(_setting: &Setting) -> Result<Finding, Broken> {
    let tree = Tree::live();
    let config = Config::of(&tree);
    let symbols = match config {
        Some(_) => String::new(),
        // Larger than other files; the kernel makes it, and it ends.
        None => fs::read_to_string("/proc/kallsyms").unwrap_or_default(),
    };
    Ok(finding(config.as_ref(), &symbols, &tree.names("/sys/module")))
}

/// What was seen of each part: what is missing is skipped by itself, and all of it only where nothing was seen to be there.
fn finding(config: Option<&Config>, symbols: &str, modules: &[String]) -> Finding {
    let found: Vec<(&Part, Is)> = PARTS.iter().map(|part| (part, is_there(part, config, symbols))).collect();
    let of = |wanted: Is| -> Vec<String> {
        let parts = found.iter().filter(|(_, is)| *is == wanted);
        parts.map(|(part, _)| format!("{} ({})", part.option, part.what)).collect()
    };
    let from = config.map_or("/proc/kallsyms", |config| config.path.as_str());
    let (there, missing, open) = (of(Is::There), of(Is::Missing), of(Is::Unknown));
    let mut said = Vec::new();
    for (word, parts) in [
        ("there", &there),
        ("skipped, because missing", &missing),
        ("skipped, because nothing here tells", &open),
    ] {
        if !parts.is_empty() {
            said.push(format!("{word}: {}", parts.join(", ")));
        }
    }
    let said = format!("by {from}: {}; {}; {DIRECT}", said.join("; "), drivers(modules));
    if there.is_empty() { Finding::skipped(said) } else { Finding::passed(said) }
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

fn is_there(part: &Part, config: Option<&Config>, symbols: &str) -> Is {
    if let Some(config) = config {
        return if config.value(part.option).is_some() { Is::There } else { Is::Missing };
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
    use std::io::Write;

    use egm_report::Outcome;

    use super::*;
    use crate::tree::tests::recorded;

    const SYMBOLS: &str =
        "0 T hmm_range_fault\n0 t pci_p2pdma_add_resource_not\n0 T memremap_pages\t[core]\n";

    /// The packed configuration of a kernel, as it gives it itself.
    fn packed(text: &str) -> Config {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(text.as_bytes()).unwrap();
        let hex: String = packed.finish().unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
        let (_folder, tree) = recorded(&format!("## /proc/config.gz\n{hex}\n"));
        Config::of(&tree).unwrap()
    }

    #[test]
    fn a_configuration_decides_and_else_the_symbols() {
        let config = packed("CONFIG_DEVICE_PRIVATE=y\n# CONFIG_HMM_MIRROR is not set\n");
        let [private, p2p, hmm, odp, zone] = &PARTS;
        assert_eq!(is_there(private, Some(&config), ""), Is::There);
        assert_eq!(is_there(hmm, Some(&config), SYMBOLS), Is::Missing);
        assert_eq!(is_there(private, None, SYMBOLS), Is::Unknown);
        assert_eq!(
            [hmm, zone, p2p, odp].map(|part| is_there(part, None, SYMBOLS)),
            [Is::There, Is::There, Is::Missing, Is::Unknown]
        );
        assert_eq!(is_there(hmm, None, ""), Is::Unknown);
    }

    #[test]
    fn what_is_missing_is_skipped_by_itself_and_nothing_seen_is_skipped_as_a_whole() {
        let config = packed("CONFIG_HMM_MIRROR=y\n");
        let some = finding(Some(&config), "", &[]);
        assert_eq!(some.outcome, Outcome::Passed, "{}", some.reason);
        assert!(some.reason.starts_with("by /proc/config.gz: there: CONFIG_HMM_MIRROR ("), "{}", some.reason);
        assert!(some.reason.contains("missing: CONFIG_DEVICE_PRIVATE ("), "{}", some.reason);
        for nothing in [finding(Some(&packed("")), "", &[]), finding(None, "", &[])] {
            assert_eq!(nothing.outcome, Outcome::Skipped, "{}", nothing.reason);
        }
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
