//! The configuration of a scenario's machine. Pure.

use std::path::Path;

use serde_json::{Value, json};

use crate::engine::scenario::{Scenario, SliceTest};

/// The configuration that extends the scenario's file in `configs`; its machine starts with `boot`.
pub(crate) fn of(scenario: &Scenario, configs: &Path, boot: Value) -> Value {
    let mut json = json!({ "name": scenario.name, "extends": configs.join(scenario.config), "boot": boot });
    if scenario.reboots {
        json["on_reset"] = json!("reboot");
    }
    if let Some(vhost) = scenario.vhost {
        json["memory"] = json!({ "page_size": "4K" }); // an upgrade needs memory in files
        let socket = (!vhost).then_some("/run/egm-vmm/demo/vsock.sock");
        json["devices"] = json!([
            { "type": "virtio-blk", "id": "disk0", "path": "/run/egm-vmm/demo/disk0.raw" },
            { "type": "virtio-net", "tap": "egmtap0", "root_port": true, "vhost": vhost },
            { "type": "virtio-vsock", "cid": 3, "socket": socket },
            { "type": "virtio-rng" },
        ]);
    }
    if let Some(region) = scenario.region {
        let (form, node) = match scenario.slice_test {
            SliceTest::Device => ("device", 0),
            _ => ("memory", u32::from(!scenario.slice_alone)),
        };
        let size = scenario.slice_test.slice();
        json["egm"] = json!([{ "region": region, "size": size, "node": node, "as": form }]);
    }
    if scenario.slice_alone {
        json["memory"] = json!({ "size": null, "nodes": [{ "id": 0, "cpus": "0" }] });
    }
    if let Some(ram) = scenario.hugetlb_ram {
        json["memory"] = json!({ "size": ram.size, "page_size": ram.page_size, "prefault": true });
    }
    if let Some(count) = scenario.vcpus {
        json["cpus"] = json!({ "count": count });
    }
    if ![scenario.assigned, scenario.servers, scenario.taps].concat().is_empty() {
        json["devices"] = devices(scenario);
    }
    json
}

fn devices(scenario: &Scenario) -> Value {
    let backend = if scenario.iommufd { "iommufd" } else { "auto" };
    let device = |function| json!({ "type": "vfio", "function": function, "backend": backend });
    let server = |socket| json!({ "type": "vfio-user", "socket": socket });
    let card = |tap| json!({ "type": "virtio-net", "tap": tap });
    let given = scenario.assigned.iter().map(device).chain(scenario.servers.iter().map(server));
    given.chain(scenario.taps.iter().map(card)).collect()
}
