//! The structures of a device that is open, with the functions that C calls inline.

use std::ffi::{c_int, c_void};

use super::Device;
use crate::verbs::library::{PollCq, PostRecv, PostSend, QueryDeviceEx, QueryPort};

/// Value of `Context::abi_compat` that marks a context inside a [`VerbsContext`] (`__VERBS_ABI_IS_EXTENDED`).
pub const EXTENDED: usize = usize::MAX;

/// `struct ibv_context_ops`: the functions that C calls inline, and padding for the others.
#[repr(C)]
#[derive(Debug)]
pub struct ContextOps {
    /// `_compat_query_device` to `_compat_create_cq`.
    pub before_poll: [*mut c_void; 11],
    /// `ibv_poll_cq`.
    pub poll_cq: Option<PollCq>,
    /// `req_notify_cq` to `_compat_destroy_qp`.
    pub before_send: [*mut c_void; 13],
    /// `ibv_post_send`.
    pub post_send: Option<PostSend>,
    /// `ibv_post_recv`.
    pub post_recv: Option<PostRecv>,
    /// `_compat_create_ah` to `_compat_async_event`.
    pub rest: [*mut c_void; 5],
}

/// `struct ibv_context`.
#[repr(C)]
pub struct Context {
    /// The device that was opened.
    pub device: *mut Device,
    /// The inline functions.
    pub ops: ContextOps,
    /// Descriptor of the character device.
    pub cmd_fd: c_int,
    /// Descriptor of its events.
    pub async_fd: c_int,
    /// Interrupts of completion queues.
    pub num_comp_vectors: c_int,
    /// The library's.
    pub mutex: libc::pthread_mutex_t,
    /// [`EXTENDED`], or an older library's.
    pub abi_compat: *mut c_void,
}

/// `struct verbs_context`, which grows at its beginning: an older library's begins later, and `sz` shows where.
#[repr(C)]
pub struct VerbsContext {
    /// Newest member that is used here.
    pub query_port: Option<QueryPort>,
    /// `advise_mr` to `create_cq_ex`.
    pub before_private: [*mut c_void; 25],
    /// `priv`.
    pub private: *mut c_void,
    /// `ibv_query_device_ex`.
    pub query_device_ex: Option<QueryDeviceEx>,
    /// `ibv_destroy_flow` to `_ABI_placeholder3`.
    pub before_size: [*mut c_void; 11],
    /// Bytes of the library's structure, this one's end being its end.
    pub sz: usize,
    /// The structure to which all other code holds a pointer.
    pub context: Context,
}
