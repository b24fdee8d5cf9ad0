//! The structures of `infiniband/verbs.h` that cross the boundary, as rdma-core 44 and later lay them out.
//!
//! Types only. What C has as an enum is `u32` here, because a library may answer with a number that no enum names.
//! `tests/layout.rs` holds sizes and offsets against recorded ones, and those against C where the headers are installed.

use std::ffi::{c_char, c_int, c_void};

pub use super::library::context::{Context, ContextOps, Cq, EXTENDED, Mr, Qp, QpInitAttr, VerbsContext};

/// Bytes of a name in sysfs (`IBV_SYSFS_NAME_MAX`).
pub const NAME_MAX: usize = 64;
/// Bytes of a path in sysfs (`IBV_SYSFS_PATH_MAX`).
pub const PATH_MAX: usize = 256;

/// `struct ibv_device`, which `ibv_get_device_list` lists.
#[repr(C)]
#[derive(Debug)]
pub struct Device {
    /// `struct _ibv_device_ops`: two functions that the header calls obsolete; unused.
    pub ops: [*mut c_void; 2],
    /// `enum ibv_node_type`; -1 if unknown.
    pub node_type: c_int,
    /// `enum ibv_transport_type`; -1 if unknown.
    pub transport_type: c_int,
    /// Of the kernel's device, `mlx5_0`.
    pub name: [c_char; NAME_MAX],
    /// Of the character device, `uverbs0`.
    pub dev_name: [c_char; NAME_MAX],
    /// Of that in sysfs.
    pub dev_path: [c_char; PATH_MAX],
    /// Of the kernel's device in sysfs.
    pub ibdev_path: [c_char; PATH_MAX],
}

/// `struct ibv_device_attr`, with its C names.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "ibv_query_device(3) has a line for each")]
pub struct DeviceAttr {
    pub fw_ver: [c_char; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: u32,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: u32,
    pub max_ee: c_int,
    pub max_rdd: c_int,
    pub max_mw: c_int,
    pub max_raw_ipv6_qp: c_int,
    pub max_raw_ethy_qp: c_int,
    pub max_mcast_grp: c_int,
    pub max_mcast_qp_attach: c_int,
    pub max_total_mcast_qp_attach: c_int,
    pub max_ah: c_int,
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// `struct ibv_odp_caps`: on-demand paging that the device supports.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct OdpCaps {
    /// Bits of `enum ibv_odp_general_caps`.
    pub general: u64,
    /// `enum ibv_odp_transport_cap_bits` of reliable connections.
    pub rc: u32,
    /// `enum ibv_odp_transport_cap_bits` of unreliable connections.
    pub uc: u32,
    /// `enum ibv_odp_transport_cap_bits` of unreliable datagrams.
    pub ud: u32,
}

/// `struct ibv_device_attr_ex`; what lies behind the capabilities of on-demand paging is only room.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DeviceAttrEx {
    /// `orig_attr`: the attributes that `ibv_query_device` returns too.
    pub orig: DeviceAttr,
    /// Which later members are present; unused.
    pub comp_mask: u32,
    /// `odp_caps`: capabilities of on-demand paging.
    pub odp: OdpCaps,
    /// Room for `completion_timestamp_mask` and later members; unused.
    pub rest: [u64; 17],
}

/// `struct ibv_port_attr`, with its C names.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "ibv_query_port(3) has a line for each")]
pub struct PortAttr {
    pub state: u32,
    pub max_mtu: u32,
    pub active_mtu: u32,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
}

/// `struct ibv_gid_entry`: an entry of a port's table, by `ibv_query_gid_table`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct GidEntry {
    /// The GID, in network order. (C aligns it to 8.)
    pub gid: [u64; 2],
    /// Its place in the port's table.
    pub gid_index: u32,
    /// The port, from 1.
    pub port_num: u32,
    /// Value of `enum ibv_gid_type`.
    pub gid_type: u32,
    /// The network interface that it came from, 0 without one.
    pub ndev_ifindex: u32,
}

/// `struct ibv_qp_cap`, with its C names.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[expect(missing_docs, reason = "ibv_create_qp(3) has a line for each")]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct ibv_ah_attr` with the `struct ibv_global_route` that it begins with.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[expect(missing_docs, reason = "ibv_modify_qp(3) has a line for each")]
pub struct AhAttr {
    pub dgid: [u64; 2],
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
    /// Padding that C inserts after `traffic_class`.
    pub padding: u8,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// `struct ibv_qp_attr`, with its C names.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[expect(missing_docs, reason = "ibv_modify_qp(3) has a line for each")]
pub struct QpAttr {
    pub qp_state: u32,
    pub cur_qp_state: u32,
    pub path_mtu: u32,
    pub path_mig_state: u32,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: u32,
    pub cap: QpCap,
    pub ah_attr: AhAttr,
    pub alt_ah_attr: AhAttr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

/// `struct ibv_sge`: a piece of registered local memory.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Sge {
    /// Address of the first byte.
    pub addr: u64,
    /// Length of the piece in bytes.
    pub length: u32,
    /// Key of the memory region.
    pub lkey: u32,
}

/// `wr.rdma` of `struct ibv_send_wr`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Rdma {
    /// Address at the other side.
    pub remote_addr: u64,
    /// Key of its memory region.
    pub rkey: u32,
}

/// `wr.atomic` of `struct ibv_send_wr`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Atomic {
    /// Address at the other side; a multiple of 8.
    pub remote_addr: u64,
    /// Number to compare with, or to add.
    pub compare_add: u64,
    /// Number to store if the comparison succeeds.
    pub swap: u64,
    /// Key of the other side's memory region.
    pub rkey: u32,
}

/// `wr` of `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub union Target {
    /// Of writes and reads.
    pub rdma: Rdma,
    /// Of `IBV_WR_ATOMIC_CMP_AND_SWP` and `IBV_WR_ATOMIC_FETCH_AND_ADD`.
    pub atomic: Atomic,
}

/// `struct ibv_send_wr`: a request for `ibv_post_send`.
#[repr(C)]
pub struct SendWr {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// Null: one at a time.
    pub next: *mut SendWr,
    /// The piece of local memory.
    pub sg_list: *mut Sge,
    /// Number of entries in `sg_list`.
    pub num_sge: c_int,
    /// Operation, a value of `enum ibv_wr_opcode`.
    pub opcode: u32,
    /// Bits of `enum ibv_send_flags`.
    pub send_flags: u32,
    /// Immediate data; never sent.
    pub imm_data: u32,
    /// The other side's memory.
    pub wr: Target,
    /// Of connections that share receivers.
    pub remote_srqn: u32,
    /// `bind_mw` or `tso`: memory windows and segmentation; unused.
    pub rest: [u64; 6],
}

/// `struct ibv_recv_wr`: a request for `ibv_post_recv`.
#[repr(C)]
#[derive(Debug)]
pub struct RecvWr {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// Null: one at a time.
    pub next: *mut RecvWr,
    /// The piece of local memory.
    pub sg_list: *mut Sge,
    /// Number of entries in `sg_list`.
    pub num_sge: c_int,
}

/// `struct ibv_wc`, with its C names.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[expect(missing_docs, reason = "ibv_poll_cq(3) has a line for each")]
pub struct Wc {
    pub wr_id: u64,
    pub status: u32,
    pub opcode: u32,
    pub vendor_err: u32,
    pub byte_len: u32,
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: u32,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}
