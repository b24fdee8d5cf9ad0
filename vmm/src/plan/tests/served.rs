//! vfio-user servers, with and without facts of them.

use super::*;
use crate::facts::Server;

const SOCKET: &str = "/run/gpu.sock";

/// A machine with a server's device behind a root port; the facts describe the server.
fn served() -> (Spec, Facts) {
    let (mut spec, mut facts) = (spec(vec![node(0, 4 * GIB, "0-3")]), facts());
    spec.devices.push(device("user0", true, DeviceKind::VfioUser { socket: SOCKET.into() }));
    let bar = |index, kind, size| HostBar { index, kind, size, start: 0 };
    facts.servers.push(Server {
        socket: SOCKET.into(),
        bars: vec![bar(0, HostBarKind::Memory32, 0x4000), bar(2, HostBarKind::Memory64Prefetchable, 3 * GIB)],
        msix_vectors: 8,
    });
    (spec, facts)
}

fn endpoint(plan: &Plan) -> &FunctionPlan {
    plan.pci.iter().find(|f| matches!(f.role, FunctionRole::Endpoint { .. })).unwrap()
}

#[test]
fn a_servers_device_has_bars_vectors_and_a_line_of_its_pin() {
    let (spec, facts) = served();
    let plan = plan(&spec, &facts).unwrap();
    check(&spec, &facts, &plan);
    let function = endpoint(&plan);
    let bars: Vec<_> = function.bars.iter().map(|bar| (bar.index, bar.kind, bar.span.size())).collect();
    let expected = [(0, BarKind::Memory32, 0x4000), (2, BarKind::Memory64Prefetchable, 4 * GIB)];
    assert_eq!((bars.as_slice(), function.msix_vectors), (expected.as_slice(), 8));
    assert!(plan.line("user0 INTA").is_some());
    assert!(plan.notes.is_empty() && plan.passthrough.is_none());
}

#[test]
fn without_its_server_the_rest_of_the_machine_is_planned_and_the_plan_states_what_it_lacks() {
    let (spec, mut facts) = served();
    facts.servers.clear();
    let plan = plan(&spec, &facts).unwrap();
    assert!(endpoint(&plan).bars.is_empty());
    let note = &plan.notes[0];
    assert!(note.contains("\"user0\"") && note.ends_with("egm-vmm facts --server /run/gpu.sock"), "{note}");
}

#[test]
fn a_slice_of_a_file_that_is_the_whole_region_is_not_shared_with_a_server() {
    let (mut spec, facts) = served();
    for (region, is_granted) in [("egm4", false), ("dax0.0", false), ("local", true)] {
        spec.egm = vec![EgmSlice { regions: vec![region.to_owned()], ..slice(1, GIB) }];
        match plan(&spec, &facts) {
            Ok(_) => assert!(is_granted, "{region}"),
            Err(error) => {
                let said = error.to_string();
                assert!(!is_granted && said.contains("\"user0\"") && said.contains(region), "{said}");
                assert!(error.help().is_some() && error.blame() == crate::error::Blame::Configuration);
            }
        }
    }
}

#[test]
fn a_bar_that_cannot_exist_is_refused_by_name() {
    let (spec, mut facts) = served();
    for (index, kind, size) in [
        (5, HostBarKind::Memory64, 0x1000),
        (0, HostBarKind::Memory64Prefetchable, u64::MAX),
        (0, HostBarKind::Memory64Prefetchable, 1 << 62),
        (0, HostBarKind::Memory32, 1 << 40),
    ] {
        facts.servers[0].bars = vec![HostBar { index, kind, size, start: 0 }];
        let error = plan(&spec, &facts).unwrap_err();
        assert_eq!(error.blame(), crate::error::Blame::Configuration, "{error}");
    }
}
