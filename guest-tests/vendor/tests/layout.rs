//! The structures by hand against C: against recorded numbers always, against the headers where they are installed.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]

use std::fmt::Write as _;
use std::mem::offset_of;
use std::path::PathBuf;
use std::process::Command;

use egm_vendor::verbs::abi::{
    AhAttr, Atomic, Context, ContextOps, Cq, Device, DeviceAttr, DeviceAttrEx, GidEntry, Mr, OdpCaps,
    PortAttr, Qp, QpAttr, QpCap, QpInitAttr, Rdma, RecvWr, SendWr, Sge, VerbsContext, Wc,
};

/// C's structure, a member or nothing for the size, ours, and what rdma-core 44 has on x86-64.
type Row = (&'static str, &'static str, usize, usize);

/// Structures that grow at their end; callers pass their size. rdma-core 56 adds a faster speed of a port.
const GROWING: [&str; 2] = ["struct ibv_port_attr", "struct ibv_device_attr_ex"];

macro_rules! size {
    ($c:literal, $ours:ty, $recorded:literal) => {
        ($c, "", size_of::<$ours>(), $recorded)
    };
}

macro_rules! at {
    ($c:literal, $ours:ty, $member:literal, $($field:tt).+, $recorded:literal) => {
        ($c, $member, offset_of!($ours, $($field).+), $recorded)
    };
}

fn rows() -> Vec<Row> {
    [devices(), objects(), requests(), contexts()].concat()
}

fn devices() -> Vec<Row> {
    vec![
        size!("struct ibv_device", Device, 664),
        at!("struct ibv_device", Device, "node_type", node_type, 16),
        at!("struct ibv_device", Device, "name", name, 24),
        at!("struct ibv_device", Device, "dev_name", dev_name, 88),
        at!("struct ibv_device", Device, "ibdev_path", ibdev_path, 408),
        size!("struct ibv_device_attr", DeviceAttr, 232),
        at!("struct ibv_device_attr", DeviceAttr, "max_mr_size", max_mr_size, 80),
        at!("struct ibv_device_attr", DeviceAttr, "max_qp_wr", max_qp_wr, 112),
        at!("struct ibv_device_attr", DeviceAttr, "max_cqe", max_cqe, 132),
        at!("struct ibv_device_attr", DeviceAttr, "max_qp_rd_atom", max_qp_rd_atom, 144),
        at!("struct ibv_device_attr", DeviceAttr, "max_qp_init_rd_atom", max_qp_init_rd_atom, 156),
        at!("struct ibv_device_attr", DeviceAttr, "atomic_cap", atomic_cap, 164),
        at!("struct ibv_device_attr", DeviceAttr, "phys_port_cnt", phys_port_cnt, 227),
        size!("struct ibv_odp_caps", OdpCaps, 24),
        at!("struct ibv_odp_caps", OdpCaps, "per_transport_caps.rc_odp_caps", rc, 8),
        size!("struct ibv_device_attr_ex", DeviceAttrEx, 400),
        at!("struct ibv_device_attr_ex", DeviceAttrEx, "odp_caps", odp, 240),
        at!("struct ibv_device_attr_ex", DeviceAttrEx, "completion_timestamp_mask", rest, 264),
        size!("struct ibv_port_attr", PortAttr, 52),
        at!("struct ibv_port_attr", PortAttr, "active_mtu", active_mtu, 8),
        at!("struct ibv_port_attr", PortAttr, "max_msg_sz", max_msg_sz, 20),
        at!("struct ibv_port_attr", PortAttr, "lid", lid, 34),
        at!("struct ibv_port_attr", PortAttr, "link_layer", link_layer, 46),
    ]
}

fn objects() -> Vec<Row> {
    vec![
        size!("struct ibv_gid_entry", GidEntry, 32),
        at!("struct ibv_gid_entry", GidEntry, "gid_index", gid_index, 16),
        at!("struct ibv_gid_entry", GidEntry, "ndev_ifindex", ndev_ifindex, 28),
        size!("struct ibv_mr", Mr, 48),
        at!("struct ibv_mr", Mr, "lkey", lkey, 36),
        at!("struct ibv_mr", Mr, "rkey", rkey, 40),
        size!("struct ibv_qp_cap", QpCap, 20),
        size!("struct ibv_qp_init_attr", QpInitAttr, 64),
        at!("struct ibv_qp_init_attr", QpInitAttr, "recv_cq", recv_cq, 16),
        at!("struct ibv_qp_init_attr", QpInitAttr, "cap", cap, 32),
        at!("struct ibv_qp_init_attr", QpInitAttr, "sq_sig_all", sq_sig_all, 56),
        size!("struct ibv_ah_attr", AhAttr, 32),
        at!("struct ibv_ah_attr", AhAttr, "grh.sgid_index", sgid_index, 20),
        at!("struct ibv_ah_attr", AhAttr, "dlid", dlid, 24),
        at!("struct ibv_ah_attr", AhAttr, "is_global", is_global, 29),
        at!("struct ibv_ah_attr", AhAttr, "port_num", port_num, 30),
        size!("struct ibv_qp_attr", QpAttr, 144),
        at!("struct ibv_qp_attr", QpAttr, "dest_qp_num", dest_qp_num, 28),
        at!("struct ibv_qp_attr", QpAttr, "ah_attr", ah_attr, 56),
        at!("struct ibv_qp_attr", QpAttr, "max_rd_atomic", max_rd_atomic, 126),
        at!("struct ibv_qp_attr", QpAttr, "min_rnr_timer", min_rnr_timer, 128),
        at!("struct ibv_qp_attr", QpAttr, "timeout", timeout, 130),
        at!("struct ibv_qp_attr", QpAttr, "rate_limit", rate_limit, 136),
    ]
}

fn requests() -> Vec<Row> {
    vec![
        size!("struct ibv_sge", Sge, 16),
        size!("struct ibv_send_wr", SendWr, 128),
        at!("struct ibv_send_wr", SendWr, "opcode", opcode, 28),
        at!("struct ibv_send_wr", SendWr, "wr", wr, 40),
        ("struct ibv_send_wr", "wr.rdma.rkey", 40 + offset_of!(Rdma, rkey), 48),
        ("struct ibv_send_wr", "wr.atomic.compare_add", 40 + offset_of!(Atomic, compare_add), 48),
        ("struct ibv_send_wr", "wr.atomic.swap", 40 + offset_of!(Atomic, swap), 56),
        ("struct ibv_send_wr", "wr.atomic.rkey", 40 + offset_of!(Atomic, rkey), 64),
        at!("struct ibv_send_wr", SendWr, "qp_type", remote_srqn, 72),
        size!("struct ibv_recv_wr", RecvWr, 32),
        size!("struct ibv_wc", Wc, 48),
        at!("struct ibv_wc", Wc, "status", status, 8),
        at!("struct ibv_wc", Wc, "byte_len", byte_len, 20),
        at!("struct ibv_wc", Wc, "qp_num", qp_num, 28),
    ]
}

fn contexts() -> Vec<Row> {
    vec![
        at!("struct ibv_qp", Qp, "qp_num", qp_num, 52),
        at!("struct ibv_cq", Cq, "cqe", cqe, 28),
        size!("struct ibv_context_ops", ContextOps, 256),
        at!("struct ibv_context_ops", ContextOps, "poll_cq", poll_cq, 88),
        at!("struct ibv_context_ops", ContextOps, "post_send", post_send, 200),
        at!("struct ibv_context_ops", ContextOps, "post_recv", post_recv, 208),
        size!("struct ibv_context", Context, 328),
        at!("struct ibv_context", Context, "ops", ops, 8),
        at!("struct ibv_context", Context, "abi_compat", abi_compat, 320),
        size!("struct verbs_context", VerbsContext, 648),
        at!("struct verbs_context", VerbsContext, "query_port", query_port, 0),
        at!("struct verbs_context", VerbsContext, "priv", private, 208),
        at!("struct verbs_context", VerbsContext, "query_device_ex", query_device_ex, 216),
        at!("struct verbs_context", VerbsContext, "sz", sz, 312),
        at!("struct verbs_context", VerbsContext, "context", context, 320),
    ]
}

#[test]
fn structures_are_as_recorded() {
    // The processor's own mutex lies in a context, so what comes behind it differs by processor.
    let mutex = size_of::<libc::pthread_mutex_t>() - 40;
    for (of, member, ours, recorded) in rows() {
        let behind =
            matches!((of, member), ("struct ibv_context", "" | "abi_compat") | ("struct verbs_context", ""));
        assert_eq!(ours, recorded + if behind { mutex } else { 0 }, "{of} {member}");
    }
}

/// Folder of the headers: `EGM_VERBS_INCLUDE`, or else the system's.
fn headers() -> Option<PathBuf> {
    let place =
        std::env::var_os("EGM_VERBS_INCLUDE").map_or_else(|| PathBuf::from("/usr/include"), PathBuf::from);
    place.join("infiniband/verbs.h").exists().then_some(place)
}

#[test]
fn structures_are_as_the_installed_headers_have_them() {
    let Some(include) = headers() else {
        println!("skipped: no infiniband/verbs.h here (Debian: libibverbs-dev)");
        return;
    };
    let mut program =
        "#include <stdio.h>\n#include <stddef.h>\n#include <infiniband/verbs.h>\nint main(void) {\n"
            .to_owned();
    for (of, member, _, _) in rows() {
        let number =
            if member.is_empty() { format!("sizeof({of})") } else { format!("offsetof({of}, {member})") };
        writeln!(program, "printf(\"%zu\\n\", {number});").unwrap();
    }
    program.push_str("}\n");
    let folder = tempfile::tempdir().unwrap();
    let (source, made) = (folder.path().join("layout.c"), folder.path().join("layout"));
    std::fs::write(&source, program).unwrap();
    let built =
        Command::new("cc").arg("-I").arg(&include).arg(&source).arg("-o").arg(&made).status().unwrap();
    assert!(built.success(), "cc fails on {}", source.display());
    let printed = String::from_utf8(Command::new(&made).output().unwrap().stdout).unwrap();
    let printed: Vec<usize> = printed.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(printed.len(), rows().len());
    for ((of, member, ours, _), c) in rows().into_iter().zip(printed) {
        let grows = member.is_empty() && GROWING.contains(&of);
        assert!(ours == c || grows && ours < c, "{of} {member}: ours {ours}, C {c}");
    }
}
