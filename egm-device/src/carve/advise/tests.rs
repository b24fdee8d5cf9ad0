//! Boundaries of the advice, on hosts of a few numbers. `tests/hosts.rs` has whole hosts.

use egm_address::{CpuSet, Hpa, SpanSet};

use super::*;
use crate::region::{Affinity, DaxFiles, Node, Pool, iomem};
use crate::retired::Retired;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn span(start: u64, size: u64) -> Span<Host> {
    Span::new(Hpa::new(start), size).unwrap()
}

/// A node with one processor.
fn node(id: u32, total: u64) -> Node {
    let cpus: CpuSet = id.to_string().parse().unwrap();
    Node { id, cpus, total: ByteSize::new(total), pools: Vec::new() }
}

/// An x86 host with RAM from address 0 on, as much at each node as `totals` have.
fn host(totals: &[u64]) -> HostFacts {
    let mut facts = HostFacts { arch: "x86_64".to_owned(), ..HostFacts::default() };
    let mut start = 0;
    for (id, total) in (0..).zip(totals) {
        facts.nodes.push(node(id, *total));
        if *total > 0 {
            facts.firmware.push(span(start, *total));
            facts.affinity.push(Affinity { domain: id, node: id, span: span(start, *total) });
            start += total;
        }
    }
    facts
}

fn region(name: &str, kind: RegionKind, node: u32, size: u64) -> Region {
    Region {
        name: name.to_owned(),
        kind,
        node: Some(node),
        size: ByteSize::new(size),
        page_size: ByteSize::new(2 * MIB),
        base: None,
        functions: Vec::new(),
        retired: Retired::new([], size, 1 << 16),
    }
}

fn egm(node: u32, size: u64) -> Region {
    region("egm", RegionKind::Egm { device: "/dev/egm4".into() }, node, size)
}

fn dax() -> Region {
    let kind = RegionKind::Devdax { device: "/dev/dax0.0".into(), files: DaxFiles::Static };
    region("dax0.0", kind, 0, GIB)
}

fn reserved() -> Region {
    region("memmap", RegionKind::Reserved { device: "/dev/mem".into() }, 0, GIB)
}

/// All nodes together keep `hypervisor` bytes.
fn request(hypervisor: u64, parts: &[(SplitMethod, Option<u64>)]) -> SplitRequest {
    let parts = parts.iter().map(|&(how, size)| SplitPart { how, size: size.map(ByteSize::new) }).collect();
    SplitRequest { hypervisor: ByteSize::new(hypervisor), per_node: false, parts }
}

fn each(request: SplitRequest) -> SplitRequest {
    SplitRequest { per_node: true, ..request }
}

#[test]
fn a_split_has_its_version_and_its_ways() {
    let split = advise(&host(&[16 * GIB]), &[], &request(4 * GIB, &[])).unwrap();
    assert_eq!((split.version, split.ways), (SPLIT_VERSION, vec![SplitMethod::Memmap]));
    let two = request(4 * GIB, &[(SplitMethod::Dax, Some(GIB)), (SplitMethod::Mem, None)]);
    assert_eq!(advise(&host(&[16 * GIB]), &[], &two).unwrap().ways, [SplitMethod::Dax, SplitMethod::Mem]);
}

#[test]
fn several_ways_come_once_and_all_but_the_last_have_a_size_in_steps_of_2_mib() {
    use SplitMethod::{Dax, Firmware, Hugetlb, Mem, Memmap};
    let split = |parts: &[_]| advise(&host(&[16 * GIB]), &[], &request(4 * GIB, parts));
    for size in [2 * MIB, 4 * MIB, GIB] {
        assert!(split(&[(Memmap, Some(size)), (Mem, None)]).is_ok(), "{size}");
    }
    for parts in [
        &[(Memmap, Some(0)), (Mem, None)][..],
        &[(Memmap, Some(MIB)), (Mem, None)],
        &[(Memmap, Some(3 * MIB)), (Mem, None)],
        &[(Memmap, None), (Mem, None)],
        &[(Memmap, Some(GIB)), (Mem, Some(GIB))],
        &[(Memmap, Some(GIB)), (Memmap, None)],
        &[(Hugetlb, Some(GIB)), (Mem, None)],
        &[(Firmware, Some(GIB))],
        &[(Dax, Some(GIB)), (Firmware, None)],
    ] {
        assert!(matches!(split(parts), Err(AdviseError::Parts(_))), "{parts:?}");
    }
    let parts = [(Memmap, Some(GIB)), (Memmap, Some(MIB)), (Mem, None)];
    assert_eq!(split(&parts), Err(AdviseError::Parts("memmap=1GiB,memmap=1MiB,mem".to_owned())));
}

/// With no room for the last way, the others may fit exactly, or not: neither is a split.
#[test]
fn sizes_leave_some_memory_to_the_last_way() {
    let split = |size| {
        let parts = [(SplitMethod::Memmap, Some(size)), (SplitMethod::Mem, None)];
        advise(&host(&[16 * GIB]), &[], &request(4 * GIB, &parts)).map(|split| split.nodes[0].hidden.clone())
    };
    let hidden = split(12 * GIB - 2 * MIB).unwrap();
    assert_eq!(
        hidden.iter().map(|piece| piece.span.size()).collect::<Vec<_>>(),
        [12 * GIB - 2 * MIB, 2 * MIB]
    );
    for size in [12 * GIB, 13 * GIB] {
        let (has, wants) = (ByteSize::new(12 * GIB), ByteSize::new(size));
        assert_eq!(split(size), Err(AdviseError::Short { node: 0, has, wants }));
    }
}

/// The kernel's `memparse` reads a number with one unit.
#[test]
fn a_size_has_the_largest_unit_that_divides_it() {
    let texts = [0, 1, 1000, 1023, 1024, 4096, MIB, 1536 * MIB, GIB, 64 * GIB, GIB + 1].map(memparse);
    assert_eq!(texts, ["0x0", "0x1", "0x3e8", "0x3ff", "1K", "4K", "1M", "1536M", "1G", "64G", "0x40000001"]);
}

#[test]
fn firmware_splits_what_the_sockets_and_their_egm_have_together() {
    let mut facts = host(&[32 * GIB, 32 * GIB, 0]);
    facts.nodes[2].cpus = CpuSet::default();
    let regions = [egm(0, 128 * GIB), egm(1, 64 * GIB), egm(1, GIB), reserved()];
    let split = advise(&facts, &regions, &each(request(16 * GIB, &[(SplitMethod::Firmware, None)]))).unwrap();
    let nodes: Vec<_> = split.nodes.iter().map(|n| (n.node, n.keeps.get(), n.guests.get())).collect();
    assert_eq!(nodes, [(0, 16 * GIB, 144 * GIB), (1, 16 * GIB, 81 * GIB)]);
    let values: Vec<_> = split.settings.iter().map(|setting| setting.value.to_string()).collect();
    assert_eq!(values, ["true", "16384", "65536", "0"]);
}

#[test]
fn firmware_reserves_memory_in_steps_of_its_form() {
    let facts = HostFacts { product: "NVIDIA GB200".to_owned(), ..host(&[64 * GIB]) };
    let kept = |bytes| {
        let split = advise(&facts, &[], &request(bytes, &[(SplitMethod::Firmware, None)])).unwrap();
        (split.nodes[0].keeps.get(), split.settings[1].value.to_string())
    };
    assert_eq!(kept(GIB), (GIB, "1024".to_owned()));
    assert_eq!(kept(GIB + 1), (GIB + (64 << 20), "1088".to_owned()));
}

#[test]
fn firmware_is_a_way_on_grace_machines_and_where_a_socket_has_egm() {
    let firmware = |product: &str, regions: &[Region]| {
        let facts = HostFacts { product: product.to_owned(), ..host(&[64 * GIB, 64 * GIB]) };
        advise(&facts, regions, &request(16 * GIB, &[(SplitMethod::Firmware, None)]))
    };
    assert!(firmware("NVIDIA GB200", &[]).is_ok());
    assert!(firmware("", &[egm(1, 64 * GIB)]).is_ok(), "one socket is enough");
    for (product, is) in [("", "x86_64"), ("PC", "PC")] {
        let error = firmware(product, &[reserved()]);
        let needs = "the firmware of an NVIDIA Grace machine";
        assert_eq!(error, Err(AdviseError::Unsupported { how: "firmware", needs, is: is.to_owned() }));
    }
}

#[test]
fn a_limit_leaves_an_amount_to_each_node_only_where_there_is_one() {
    let mem =
        |totals: &[u64]| advise(&host(totals), &[], &each(request(4 * GIB, &[(SplitMethod::Mem, None)])));
    assert_eq!(mem(&[16 * GIB]).unwrap().words, ["mem=4G"]);
    let keeps = ByteSize::new(4 * GIB);
    assert_eq!(mem(&[16 * GIB, 16 * GIB]), Err(AdviseError::OneLimit { keeps, nodes: 2 }));
}

#[test]
fn a_node_keeps_its_share_in_whole_gib() {
    let split =
        advise(&host(&[16 * GIB, 16 * GIB]), &[], &request(3 * GIB, &[(SplitMethod::Memmap, None)])).unwrap();
    assert_eq!(split.words, ["memmap=14G$2G", "memmap=14G$18G"]);
    assert!(split.nodes.iter().all(|node| node.keeps.get() == 2 * GIB));
    // Half of 3 GiB would end in the middle of a page here.
    let mut shifted = host(&[16 * GIB, 16 * GIB]);
    shifted.firmware = vec![span(GIB / 2, 32 * GIB)];
    shifted.affinity[0].span = span(GIB / 2, 16 * GIB);
    shifted.affinity[1].span = span(GIB / 2 + 16 * GIB, 16 * GIB);
    let split = advise(&shifted, &[], &request(3 * GIB, &[(SplitMethod::Memmap, None)])).unwrap();
    assert_eq!(split.nodes[0].keeps.get(), 5 * GIB / 2 + GIB / 2);
}

#[test]
fn hidden_memory_has_words_and_a_region_for_each_piece_that_dev_mem_reaches() {
    let parts =
        [(SplitMethod::Dax, Some(GIB)), (SplitMethod::Memmap, Some(2 * GIB)), (SplitMethod::Mem, None)];
    let facts = HostFacts { command_line: "quiet mem=2G memmap=1G!4G".to_owned(), ..host(&[16 * GIB]) };
    let split = advise(&facts, &[], &request(4 * GIB, &parts)).unwrap();
    assert_eq!(split.words, ["mem=4G", "memmap=1G!4G", "memmap=2G$5G"]);
    assert_eq!(split.remove, ["mem=2G"], "the other word stays");
    let regions: Vec<_> =
        split.regions.iter().map(|r| (r.name.as_str(), r.base.get(), r.size.get())).collect();
    assert_eq!(regions, [("memmap", 5 * GIB, 2 * GIB), ("mem", 7 * GIB, 9 * GIB)]);
    let two =
        advise(&host(&[16 * GIB, 16 * GIB]), &[], &request(8 * GIB, &[(SplitMethod::Memmap, None)])).unwrap();
    let names: Vec<_> = two.regions.iter().map(|r| (r.name.as_str(), r.node)).collect();
    assert_eq!(names, [("memmap0", Some(0)), ("memmap1", Some(1))]);
}

/// ndctl takes the description of a namespace from its memory, in pages of its alignment.
#[test]
fn device_dax_has_pages_of_1_gib_where_more_than_one_fits() {
    let align = |size: u64, parts: &[_]| {
        let split = advise(&host(&[4 * GIB + size]), &[], &request(4 * GIB, parts)).unwrap();
        let pieces = split.nodes[0].hidden.iter().filter(|piece| piece.how == SplitMethod::Dax);
        assert_eq!((pieces.count(), split.commands.len()), (1, 1));
        split.commands[0].rsplit_once("--align=").unwrap().1.to_owned()
    };
    let all = [(SplitMethod::Dax, None)];
    assert_eq!([8 * GIB, 2 * GIB, GIB].map(|size| align(size, &all)), ["1G", "1G", "2M"]);
    let behind = [(SplitMethod::Memmap, Some(2 * MIB)), (SplitMethod::Dax, None)];
    assert_eq!(align(8 * GIB, &behind), "2M", "it begins between two pages");
}

#[test]
fn a_node_without_memory_has_no_huge_pages() {
    let mut facts = host(&[16 * GIB, 0, 16 * GIB]);
    for node in &mut facts.nodes {
        let pool = |page| Pool { page_size: ByteSize::new(page), total: 0, free: 0 };
        node.pools = [2 * MIB, GIB].map(pool).to_vec();
    }
    let split = advise(&facts, &[], &each(request(4 * GIB, &[(SplitMethod::Hugetlb, None)]))).unwrap();
    assert_eq!(split.words, ["default_hugepagesz=1G", "hugepagesz=1G", "hugepages=0:12,2:12"]);
    let one = advise(
        &HostFacts { nodes: facts.nodes[..2].to_vec(), ..facts },
        &[],
        &request(4 * GIB, &[(SplitMethod::Hugetlb, None)]),
    );
    assert_eq!(one.unwrap().words[2], "hugepages=12");
}

/// Only words that hide memory make the kernel's own map incomplete; the firmware's map is never.
#[test]
fn the_kernel_s_map_serves_as_long_as_no_word_hides_memory() {
    let with = |line: &str, firmware: &[Span<Host>]| {
        let ram = iomem::Resource { span: span(0, 16 * GIB), depth: 0, name: "System RAM".to_owned() };
        let facts = HostFacts {
            command_line: line.to_owned(),
            firmware: firmware.to_vec(),
            iomem: vec![ram],
            ..host(&[16 * GIB])
        };
        advise(&facts, &[], &request(4 * GIB, &[(SplitMethod::Memmap, None)]))
    };
    assert!(with("quiet hugepages=4", &[]).is_ok());
    let words = vec!["mem=8G".to_owned()];
    assert_eq!(with("quiet hugepages=4 mem=8G", &[]), Err(AdviseError::AlreadySplit { words }));
    assert!(with("mem=8G", &[span(0, 16 * GIB)]).is_ok());
}

#[test]
fn memory_without_a_whole_gib_is_hidden_in_steps_of_2_mib() {
    let ram: SpanSet<Host> = [span(GIB + MIB, 512 * MIB)].into_iter().collect();
    // 63 MiB stay, and what is left of the 2 MiB at either end.
    assert_eq!(ram::hidden(&ram, 64 * MIB), [span(GIB + 64 * MIB, 448 * MIB)]);
}

#[test]
fn undo_is_empty_without_a_split_and_needs_a_reboot_for_words_and_settings_only() {
    let of = |line: &str, regions: &[Region]| {
        let facts = HostFacts { command_line: line.to_owned(), ..HostFacts::default() };
        undo(&facts, regions)
    };
    let pool = region("hugetlb0", RegionKind::Hugetlb, 0, GIB);
    let nothing = of("quiet", &[pool]);
    assert_eq!((nothing.is_empty(), nothing.needs_reboot()), (true, false));
    let words = of("quiet mem=8G", &[]);
    assert_eq!((words.is_empty(), words.needs_reboot()), (false, true));
    let settings = of("quiet", &[egm(0, GIB), egm(1, GIB)]);
    assert_eq!((settings.settings.len(), settings.needs_reboot()), (1, true), "one switch for all sockets");
    let file = of("quiet", &[reserved()]);
    assert_eq!(
        (file.regions.as_slice(), file.is_empty(), file.needs_reboot()),
        (&["memmap".to_owned()][..], false, false)
    );
}

#[test]
fn a_dax_device_becomes_ram_by_a_command_unless_a_word_made_it() {
    let of = |line: &str| {
        let facts = HostFacts { command_line: line.to_owned(), ..HostFacts::default() };
        undo(&facts, &[dax()])
    };
    assert_eq!(of("quiet").commands, ["daxctl reconfigure-device --mode=system-ram dax0.0"]);
    assert_eq!(of("memmap=1G$8G").commands.len(), 1, "another way");
    let made = of("memmap=1G!8G");
    assert_eq!((made.commands.len(), made.remove), (0, vec!["memmap=1G!8G".to_owned()]));
}

#[test]
fn a_host_has_a_usual_way() {
    let usual = |arch: &str, product: &str, regions: &[Region]| {
        let facts = HostFacts { arch: arch.to_owned(), product: product.to_owned(), ..HostFacts::default() };
        usual(&facts, regions)
    };
    assert_eq!(usual("x86_64", "PC", &[]), SplitMethod::Memmap);
    assert_eq!(usual("aarch64", "Altra", &[reserved()]), SplitMethod::Hugetlb);
    assert_eq!(usual("aarch64", "NVIDIA Grace CPU", &[]), SplitMethod::Firmware);
    assert_eq!(usual("aarch64", "", &[reserved(), egm(0, GIB)]), SplitMethod::Firmware);
}

/// `mem=` is an address on x86 and an amount on Arm, and `memmap=` exists on x86 only.
#[test]
fn arm_has_no_memmap_and_its_mem_counts_bytes() {
    let ram = [span(2 * GIB, 4 * GIB), span(16 * GIB, 12 * GIB)];
    let split = |arch: &str, how| {
        let facts = HostFacts { arch: arch.to_owned(), firmware: ram.to_vec(), ..host(&[16 * GIB]) };
        advise(&facts, &[], &request(8 * GIB, &[(how, None)]))
    };
    assert_eq!(split("x86_64", SplitMethod::Mem).unwrap().words, ["mem=20G"]);
    assert_eq!(split("aarch64", SplitMethod::Mem).unwrap().words, ["mem=8G"]);
    for how in [SplitMethod::Memmap, SplitMethod::Dax] {
        assert!(split("x86_64", how).is_ok());
        let refused = split("aarch64", how);
        assert!(matches!(refused, Err(AdviseError::Unsupported { is, .. }) if is == "aarch64"));
    }
}

#[test]
fn an_error_blames_the_wish_or_the_host_and_has_a_way_out() {
    let bytes = ByteSize::new(GIB);
    let unsupported = |how| AdviseError::Unsupported { how, needs: "", is: String::new() };
    for (error, blame, help) in [
        (
            AdviseError::NothingLeft { node: 0, has: bytes, keeps: bytes },
            Blame::Configuration,
            "--hypervisor",
        ),
        (AdviseError::Short { node: 0, has: bytes, wants: bytes }, Blame::Configuration, "--how"),
        (AdviseError::Parts(String::new()), Blame::Configuration, "--how memmap=1GiB,mem"),
        (AdviseError::OneLimit { keeps: bytes, nodes: 2 }, Blame::Configuration, "--how memmap"),
        (AdviseError::IomemHidden, Blame::Host, "run it as root"),
        (AdviseError::AlreadySplit { words: Vec::new() }, Blame::Host, "--undo"),
        (AdviseError::NoAffinity { nodes: 2 }, Blame::Host, "--how mem or --how hugetlb"),
        (unsupported("firmware"), Blame::Host, "on x86 also memmap"),
        (unsupported("dax"), Blame::Host, "use --how mem or --how hugetlb"),
    ] {
        assert_eq!(error.blame(), blame, "{error}");
        assert!(error.help().is_some_and(|text| text.contains(help)), "{error}");
    }
}
