//! The structures of a device that is open, those that point to it, and the types of the functions that C calls inline.

use std::ffi::{c_int, c_void};

use crate::verbs::abi::{Device, DeviceAttrEx, PortAttr, QpCap, RecvWr, SendWr, Wc};

/// Type of `poll_cq` in `struct ibv_context_ops`.
pub(crate) type PollCq = unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int;
/// Type of `post_send` in `struct ibv_context_ops`.
pub(crate) type PostSend = unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int;
/// Type of `post_recv` in `struct ibv_context_ops`.
pub(crate) type PostRecv = unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int;
/// Type of `query_port` in `struct verbs_context`.
pub(crate) type QueryPort = unsafe extern "C" fn(*mut Context, u8, *mut PortAttr, usize) -> c_int;
/// Type of `query_device_ex` in `struct verbs_context`.
pub(crate) type QueryDeviceEx =
    unsafe extern "C" fn(*mut Context, *const c_void, *mut DeviceAttrEx, usize) -> c_int;

/// Value of `Context::abi_compat` that marks a context inside a [`VerbsContext`] (`__VERBS_ABI_IS_EXTENDED`).
pub const EXTENDED: usize = usize::MAX;

/// `struct ibv_context_ops`: the functions that C calls inline, and padding for the others.
#[repr(C)]
#[derive(Debug)]
pub struct ContextOps {
    /// Members `_compat_query_device` to `_compat_create_cq`, unused.
    pub before_poll: [*mut c_void; 11],
    /// Function behind C's inline `ibv_poll_cq`.
    pub poll_cq: Option<PollCq>,
    /// Members `req_notify_cq` to `_compat_destroy_qp`, unused.
    pub before_send: [*mut c_void; 13],
    /// Function behind C's inline `ibv_post_send`.
    pub post_send: Option<PostSend>,
    /// Function behind C's inline `ibv_post_recv`.
    pub post_recv: Option<PostRecv>,
    /// Members `_compat_create_ah` to `_compat_async_event`, unused.
    pub rest: [*mut c_void; 5],
}

/// `struct ibv_context`: a device that `ibv_open_device` opened.
#[repr(C)]
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct Context {
    /// The device that was opened.
    pub device: *mut Device,
    pub ops: ContextOps,
    /// Descriptor of the character device.
    pub cmd_fd: c_int,
    /// Descriptor of its events.
    pub async_fd: c_int,
    /// Interrupts of completion queues.
    pub num_comp_vectors: c_int,
    pub mutex: libc::pthread_mutex_t,
    /// [`EXTENDED`], or an older library's.
    pub abi_compat: *mut c_void,
}

/// `struct verbs_context`, which grows at its beginning: an older library's begins later, and `sz` shows where.
#[repr(C)]
pub struct VerbsContext {
    /// Newest member that is used here.
    pub query_port: Option<QueryPort>,
    /// Members `advise_mr` to `create_cq_ex`, unused.
    pub before_private: [*mut c_void; 25],
    /// `priv`: the library's own data, unused.
    pub private: *mut c_void,
    /// Function behind C's inline `ibv_query_device_ex`.
    pub query_device_ex: Option<QueryDeviceEx>,
    /// Members `ibv_destroy_flow` to `_ABI_placeholder3`, unused.
    pub before_size: [*mut c_void; 11],
    /// Bytes of the library's structure, this one's end being its end.
    pub sz: usize,
    /// The structure to which all other code holds a pointer.
    pub context: Context,
}

/// `struct ibv_mr`: a memory region that a device may use.
#[repr(C)]
#[derive(Debug)]
#[expect(missing_docs, reason = "ibv_reg_mr(3) has a line for each")]
pub struct Mr {
    pub context: *mut Context,
    pub pd: *mut c_void,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// `struct ibv_qp_init_attr`, with its C names.
#[repr(C)]
#[derive(Debug)]
#[expect(missing_docs, reason = "ibv_create_qp(3) has a line for each")]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut c_void,
    pub cap: QpCap,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
}

/// The beginning of `struct ibv_qp`; only libraries make one.
#[repr(C)]
#[derive(Debug)]
#[expect(missing_docs, reason = "the names are C's")]
pub struct Qp {
    pub context: *mut Context,
    pub qp_context: *mut c_void,
    pub pd: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut c_void,
    pub handle: u32,
    pub qp_num: u32,
}

/// The beginning of `struct ibv_cq`; only libraries make one.
#[repr(C)]
#[derive(Debug)]
#[expect(missing_docs, reason = "the names are C's")]
pub struct Cq {
    pub context: *mut Context,
    pub channel: *mut c_void,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
}
