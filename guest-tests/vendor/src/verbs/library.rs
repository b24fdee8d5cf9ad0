//! The unsafe module of the library itself: its functions, found by name.
//!
//! Callers rely on this: the pointers in [`Functions`] stay callable as long as the [`Verbs`] that they came from, and
//! have C's types. The second rests on the file name `libibverbs.so.1` alone; nothing can check it.
#![expect(unsafe_code, reason = "functions of a library that is loaded at run time")]

pub(super) mod context;

use std::ffi::{c_int, c_void};

use libloading::Library;

use crate::verbs::VerbsError;
use crate::verbs::abi::{Context, Cq, Device, DeviceAttr, GidEntry, Mr, PortAttr, Qp, QpAttr, QpInitAttr};

const NAME: &str = "libibverbs.so.1";

macro_rules! functions {
    ($($(#[$note:meta])* $field:ident: $symbol:literal = fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Functions of the library, by their C names without `ibv_`.
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct Functions {
            $($(#[$note])* pub(crate) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// `None` in rdma-core before 34, which added it.
            pub(crate) reg_dmabuf_mr: Option<RegDmabufMr>,
        }

        impl Functions {
            fn of(library: &Library) -> Result<Self, VerbsError> {
                Ok(Self {
                    $($field: find(library, NAME, $symbol)?,)*
                    reg_dmabuf_mr: find(library, NAME, "ibv_reg_dmabuf_mr").ok(),
                })
            }
        }
    };
}

type RegDmabufMr = unsafe extern "C" fn(*mut c_void, u64, usize, u64, c_int, c_int) -> *mut Mr;

functions! {
    get_device_list: "ibv_get_device_list" = fn(*mut c_int) -> *mut *mut Device;
    free_device_list: "ibv_free_device_list" = fn(*mut *mut Device);
    open_device: "ibv_open_device" = fn(*mut Device) -> *mut Context;
    close_device: "ibv_close_device" = fn(*mut Context) -> c_int;
    query_device: "ibv_query_device" = fn(*mut Context, *mut DeviceAttr) -> c_int;
    /// Fills less than all of the structure in old libraries: only used where `query_port` of the context is not there.
    query_port: "ibv_query_port" = fn(*mut Context, u8, *mut PortAttr) -> c_int;
    query_gid_table: "_ibv_query_gid_table" = fn(*mut Context, *mut GidEntry, usize, u32, usize) -> isize;
    alloc_pd: "ibv_alloc_pd" = fn(*mut Context) -> *mut c_void;
    dealloc_pd: "ibv_dealloc_pd" = fn(*mut c_void) -> c_int;
    reg_mr: "ibv_reg_mr" = fn(*mut c_void, *mut c_void, usize, c_int) -> *mut Mr;
    /// Leaves out optional flags that an old kernel does not take.
    reg_mr_iova2: "ibv_reg_mr_iova2" = fn(*mut c_void, *mut c_void, usize, u64, u32) -> *mut Mr;
    dereg_mr: "ibv_dereg_mr" = fn(*mut Mr) -> c_int;
    create_cq: "ibv_create_cq" = fn(*mut Context, c_int, *mut c_void, *mut c_void, c_int) -> *mut Cq;
    destroy_cq: "ibv_destroy_cq" = fn(*mut Cq) -> c_int;
    create_qp: "ibv_create_qp" = fn(*mut c_void, *mut QpInitAttr) -> *mut Qp;
    destroy_qp: "ibv_destroy_qp" = fn(*mut Qp) -> c_int;
    modify_qp: "ibv_modify_qp" = fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
}

/// libibverbs, loaded until this is dropped.
#[derive(Debug)]
pub struct Verbs {
    pub(crate) functions: Functions,
    /// Unloaded after all that points into it; contexts borrow `self`.
    _library: Library,
}

impl Verbs {
    /// The file that every version since 2008 is called by.
    pub const NAME: &str = NAME;

    /// Takes `library`, which is [`Verbs::NAME`] or keeps its interface.
    ///
    /// # Errors
    ///
    /// When it lacks a function that is needed.
    pub fn new(library: Library) -> Result<Self, VerbsError> {
        Ok(Self { functions: Functions::of(&library)?, _library: library })
    }
}

/// The function `symbol` of `library`, which was loaded from the file `name`.
pub(crate) fn find<T: Copy>(
    library: &Library,
    name: &'static str,
    symbol: &'static str,
) -> Result<T, VerbsError> {
    // SAFETY: `T` is the function's type as rdma-core's header has it, which later ones keep.
    let found = unsafe { library.get::<T>(symbol.as_bytes()) };
    Ok(*found.map_err(|_| VerbsError::Symbol { library: name, symbol })?)
}
