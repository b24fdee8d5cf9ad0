//! Claim: the PCI tree is the planned one. Every function is at its address with its BARs at the planned places and no
//! other, root ports lead to the planned buses and forward the planned windows, PCI Express functions have their 4096 bytes
//! of configuration space, which only ECAM reaches, and nothing is there that was not planned.

use std::collections::BTreeSet;
use std::fs;

use egm_address::{Gpa, Guest, Span};

use super::Context;
use crate::error::Broken;
use crate::expect::{Bar, BarKind, Device, DeviceKind, Function, Role};
use crate::finding::{Claim, Finding};
use crate::{config_space, sysfs};

/// Configuration space that only ECAM reaches.
const EXTENDED: u64 = 4096;
/// `IORESOURCE_MEM`, `IORESOURCE_PREFETCH` and `IORESOURCE_MEM_64` of Linux's `ioport.h`.
const MEMORY: u64 = 0x200;
const PREFETCH: u64 = 0x2000;
const MEMORY_64: u64 = 0x10_0000;

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let plan = &context.plan;
    let mut claim = Claim::default();
    let there: BTreeSet<String> = sysfs::names("/sys/bus/pci/devices").into_iter().collect();
    let planned: BTreeSet<String> = plan.pci.iter().map(|f| f.address.to_string()).collect();
    for name in there.difference(&planned) {
        claim.untrue(format!("{name} is not planned"));
    }
    for name in planned.difference(&there) {
        claim.untrue(format!("{name} is missing"));
    }
    for function in plan.pci.iter().filter(|f| there.contains(&f.address.to_string())) {
        function_is_as_planned(&mut claim, function)?;
    }
    claim.seen(format!("{} functions", there.len()));
    Ok(claim.finish())
}

fn function_is_as_planned(claim: &mut Claim, function: &Function) -> Result<(), Broken> {
    let folder = sysfs::pci(function.address);
    let number = |name: &str| sysfs::number(folder.join(name));
    let at = function.address;
    // Linux looks for more than 256 bytes only behind a PCI Express capability.
    if config_space::capability(&sysfs::bytes(folder.join("config"))?, config_space::PCI_EXPRESS).is_some() {
        let config =
            fs::metadata(folder.join("config")).map_err(Broken::file("stat", folder.join("config")))?;
        claim.equal(format!("the size of {at}'s configuration space"), &config.len(), &EXTENDED);
    }
    let resources = parse(&sysfs::text(folder.join("resource"))?)?;
    bars(claim, function, &resources);
    let class = number("class")? >> 8;
    match &function.role {
        Role::HostBridge => claim.equal(format!("the class of {at}"), &class, &0x0600),
        Role::RootPort { secondary, subordinate, window32, window64 } => {
            claim.equal(format!("the class of {at}"), &class, &0x0604);
            for (file, bus) in [("secondary_bus_number", secondary), ("subordinate_bus_number", subordinate)]
            {
                claim.equal(format!("{file} of {at}"), &number(file)?, &u64::from(*bus));
            }
            windows(claim, function, &resources, [*window32, *window64]);
        }
        Role::Endpoint { device, .. } => {
            identity(claim, function, device, class, number("vendor")?, number("device")?)
        }
    }
    Ok(())
}

/// A virtio function has the vendor, the modern device id (virtio 1.2, 4.1.2.1) and the class of its type.
fn identity(claim: &mut Claim, function: &Function, device: &Device, class: u64, vendor: u64, id: u64) {
    let at = function.address;
    let (kind, base) = match device.kind {
        DeviceKind::VirtioNet { .. } => (1, Some(0x02)),
        DeviceKind::VirtioBlk { .. } => (2, Some(0x01)),
        DeviceKind::VirtioRng => (4, None),
        DeviceKind::VirtioVsock { .. } => (19, None),
        DeviceKind::Other => return,
    };
    claim.equal(format!("the vendor of {at}"), &vendor, &0x1af4);
    claim.equal(format!("the device id of {at}"), &id, &(0x1040 + kind));
    if let Some(base) = base {
        claim.equal(format!("the base class of {at}"), &(class >> 8), &base);
    }
}

/// A line of a `resource` file: where it is and its flags; `None` when unused.
type Resource = Option<(Span<Guest>, u64)>;

/// Reads a `resource` file: `start end flags` a line.
fn parse(text: &str) -> Result<Vec<Resource>, Broken> {
    text.lines()
        .map(|line| {
            let wrong = || Broken::text("a PCI resource file", line, "`start end flags`");
            let numbers: Option<Vec<u64>> = line.split(' ').map(sysfs::parse_number).collect();
            match numbers.as_deref() {
                Some([_, _, 0]) => Ok(None),
                Some([first, last, flags]) => {
                    let end = last.checked_add(1).ok_or_else(wrong)?;
                    Ok(Span::between(Gpa::new(*first), Gpa::new(end)).map(|span| (span, *flags)))
                }
                _ => Err(wrong()),
            }
        })
        .collect()
}

fn bars(claim: &mut Claim, function: &Function, resources: &[Resource]) {
    let at = function.address;
    for (index, resource) in resources.iter().enumerate().take(6) {
        let planned = function.bars.iter().find(|bar| usize::from(bar.index) == index);
        match (resource, planned) {
            (None, None) => {}
            // A function that the VMM did not make may have I/O ports; they are the host's business.
            (Some((_, flags)), None) if flags & MEMORY == 0 && foreign(function) => {}
            (Some((span, _)), None) => claim.untrue(format!("BAR {index} of {at} at {span} is not planned")),
            (None, Some(bar)) => {
                claim.untrue(format!("BAR {index} of {at} is missing, planned {}", bar.span))
            }
            (Some((span, flags)), Some(bar)) => {
                claim.equal(format!("BAR {index} of {at}"), span, &bar.span);
                kind(claim, function, bar, *flags);
            }
        }
    }
}

fn foreign(function: &Function) -> bool {
    matches!(&function.role, Role::Endpoint { device, .. } if device.kind == DeviceKind::Other)
}

fn kind(claim: &mut Claim, function: &Function, bar: &Bar, flags: u64) {
    let wanted = match bar.kind {
        BarKind::Memory32 => MEMORY,
        BarKind::Memory64 => MEMORY | MEMORY_64,
        BarKind::Memory64Prefetchable => MEMORY | PREFETCH | MEMORY_64,
    };
    claim.holds(flags & (MEMORY | PREFETCH | MEMORY_64) == wanted, || {
        format!("BAR {} of {} has the flags {flags:#x}, planned {:?}", bar.index, function.address, bar.kind)
    });
}

/// The last four lines of a bridge are its windows: I/O, memory, prefetchable memory, and one unused.
fn windows(
    claim: &mut Claim,
    function: &Function,
    resources: &[Resource],
    planned: [Option<Span<Guest>>; 2],
) {
    let first = resources.len().saturating_sub(4);
    for (line, (what, planned)) in ["memory", "prefetchable"].into_iter().zip(planned).enumerate() {
        let is = resources.get(first + 1 + line).copied().flatten().map(|(span, _)| span);
        claim.equal(format!("the {what} window of {}", function.address), &is, &planned);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expect::Plan;
    use crate::expect::tests::q35;

    const PORT: &str = include_str!("../../fixtures/q35/root-port-resource");
    const BLK: &str = include_str!("../../fixtures/q35/virtio-blk-resource");

    fn function<'a>(plan: &'a Plan, address: &str) -> &'a Function {
        plan.pci.iter().find(|f| f.address.to_string() == address).unwrap()
    }

    fn judged(text: &str, address: &str) -> String {
        let (plan, mut claim) = (q35(), Claim::default());
        let function = function(&plan, address);
        let resources = parse(text).unwrap();
        bars(&mut claim, function, &resources);
        if let Role::RootPort { window32, window64, .. } = &function.role {
            windows(&mut claim, function, &resources, [*window32, *window64]);
        }
        claim.finish().reason
    }

    #[test]
    fn recorded_functions_are_as_planned() {
        assert_eq!(judged(PORT, "0000:00:02.0"), "");
        assert_eq!(judged(BLK, "0000:00:03.0"), "");
    }

    #[test]
    fn a_bar_elsewhere_of_another_kind_or_not_planned_is_named() {
        let moved =
            BLK.replace("0x00000000fe601000 0x00000000fe601fff", "0x00000000fe701000 0x00000000fe701fff");
        assert_eq!(
            judged(&moved, "0000:00:03.0"),
            "BAR 1 of 0000:00:03.0 is 0xfe701000..0xfe702000, planned 0xfe601000..0xfe602000"
        );
        assert!(
            judged(&BLK.replace("14220c", "04020c"), "0000:00:03.0")
                .contains("BAR 4 of 0000:00:03.0 has the flags")
        );
        let more = BLK.replacen(
            "0x0000000000000000 0x0000000000000000 0x0000000000000000",
            "0x00000000fe608000 0x00000000fe608fff 0x0000000000040200",
            1,
        );
        assert_eq!(
            judged(&more, "0000:00:03.0"),
            "BAR 0 of 0000:00:03.0 at 0xfe608000..0xfe609000 is not planned"
        );
    }

    #[test]
    fn a_window_that_moved_is_named() {
        let moved = PORT.replace("0x00000000fe9fffff", "0x00000000feafffff");
        assert!(
            judged(&moved, "0000:00:02.0")
                .starts_with("the prefetchable window of 0000:00:02.0 is Some(0xfe800000..0xfeb00000)")
        );
    }

    #[test]
    fn another_virtio_type_is_named() {
        let (plan, mut claim) = (q35(), Claim::default());
        let function = function(&plan, "0000:00:03.0");
        let (_, device) = plan.devices().find(|(f, _)| f.address == function.address).unwrap();
        identity(&mut claim, function, device, 0x0100, 0x1af4, 0x1042);
        assert!(claim.is_true());
        identity(&mut claim, function, device, 0x0200, 0x1af4, 0x1041);
        assert!(claim.finish().reason.contains("the device id of 0000:00:03.0 is 4161, planned 4162"));
    }
}
