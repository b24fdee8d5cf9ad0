//! GDRCopy's library, loaded at run time. Its interface is `gdrapi.h` of GDRCopy 2.6; all calls used here exist since
//! 2.0.
//!
//! An unsafe module. It guarantees: a name that is found has the type that the header gives it; a mapping is accessed
//! by the library's own copies and inside its bounds only; and it is undone once, before its handle goes.
#![expect(unsafe_code, reason = "calls into a library that is loaded at run time")]

use std::ffi::{c_int, c_ulong, c_void};
use std::io;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};

use crate::gdr::{GdrError, Window, inside};

/// `gdr_t`: the library's handle from `gdr_open`.
type Raw = *mut c_void;

/// `gdr_mh_t`: a pinned buffer.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Handle {
    number: c_ulong,
}

/// `gdr_info_v2_t`, which `gdr_get_info_v2` fills in.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Info {
    address: u64,
    mapped_bytes: u64,
    page_bytes: u32,
    cycles: u64,
    cycles_per_ms: u32,
    /// Bit 0: mapped; bit 1: write-combining.
    flags: u32,
    mapping: c_int,
}

const _: () = assert!(size_of::<Info>() == 48);

/// Declares [`Functions`] and reads each by its name.
macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        #[derive(Debug)]
        struct Functions { $($field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)* }

        impl Functions {
            fn of(library: &libloading::Library) -> Result<Self, GdrError> {
                Ok(Self { $($field: symbol(library, $symbol)?,)* })
            }
        }
    };
}

functions! {
    open = "gdr_open": fn() -> Raw;
    close = "gdr_close": fn(Raw) -> c_int;
    pin = "gdr_pin_buffer": fn(Raw, c_ulong, usize, u64, u32, *mut Handle) -> c_int;
    unpin = "gdr_unpin_buffer": fn(Raw, Handle) -> c_int;
    map = "gdr_map": fn(Raw, Handle, *mut *mut c_void, usize) -> c_int;
    unmap = "gdr_unmap": fn(Raw, Handle, *mut c_void, usize) -> c_int;
    info = "gdr_get_info_v2": fn(Raw, Handle, *mut Info) -> c_int;
    write = "gdr_copy_to_mapping": fn(Handle, *mut c_void, *const c_void, usize) -> c_int;
    read = "gdr_copy_from_mapping": fn(Handle, *mut c_void, *const c_void, usize) -> c_int;
}

fn symbol<F: Copy>(library: &libloading::Library, name: &'static str) -> Result<F, GdrError> {
    // SAFETY: `F` is the type that gdrapi.h gives this name (the table above).
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.map(|found| *found).map_err(|source| GdrError::Symbol { symbol: name, source })
}

fn checked(call: &'static str, status: c_int) -> Result<(), GdrError> {
    if status == 0 {
        Ok(())
    } else {
        Err(GdrError::Call { call, source: io::Error::from_raw_os_error(status.abs()) })
    }
}

/// An open handle of GDRCopy (`gdr_t`), closed on drop.
#[derive(Debug)]
pub struct Gdr {
    functions: Functions,
    raw: Raw,
    /// Keeps the functions; never unloaded.
    _loaded: ManuallyDrop<libloading::Library>,
}

impl Gdr {
    /// Opens a library that was loaded.
    ///
    /// # Errors
    /// [`GdrError::Symbol`]; [`GdrError::NoDriver`] when it has no way to the GPU.
    pub fn open(loaded: libloading::Library) -> Result<Self, GdrError> {
        let functions = Functions::of(&loaded)?;
        // SAFETY: it takes nothing.
        let raw = unsafe { (functions.open)() };
        if raw.is_null() {
            return Err(GdrError::NoDriver(io::Error::last_os_error()));
        }
        Ok(Self { functions, raw, _loaded: ManuallyDrop::new(loaded) })
    }

    /// Pins and maps `bytes` of a GPU's own memory at `address`, which is a multiple of 64 KiB, as is `bytes`.
    ///
    /// # Errors
    /// [`GdrError::Call`] with the library's code; [`GdrError::Pinned`] when it reports that it pinned something else.
    pub fn map(&self, address: u64, bytes: usize) -> Result<Mapped<'_>, GdrError> {
        let mut mapped = Mapped { gdr: self, handle: Handle::default(), at: None, bytes };
        let place = c_ulong::try_from(address).map_err(|_| GdrError::Outside {
            offset: usize::MAX,
            bytes,
            within: usize::MAX,
        })?;
        // SAFETY: it is open; the library looks the address up with the driver; a place for a handle.
        let status = unsafe { (self.functions.pin)(self.raw, place, bytes, 0, 0, &raw mut mapped.handle) };
        if let Err(error) = checked("gdr_pin_buffer", status) {
            // Nothing is pinned, so there is nothing to undo.
            std::mem::forget(mapped);
            return Err(error);
        }
        let mut info = Info::default();
        // SAFETY: it is open, the handle is pinned, a place for its answer.
        let status = unsafe { (self.functions.info)(self.raw, mapped.handle, &raw mut info) };
        checked("gdr_get_info", status)?;
        if info.address != address || info.mapped_bytes < bytes as u64 {
            return Err(GdrError::Pinned { asked: bytes, address, is: info.mapped_bytes, at: info.address });
        }
        let mut at = ptr::null_mut();
        // SAFETY: it is open, the handle is pinned and has `bytes` bytes, a place for an address.
        let status = unsafe { (self.functions.map)(self.raw, mapped.handle, &raw mut at, bytes) };
        checked("gdr_map", status)?;
        mapped.at = NonNull::new(at);
        Ok(mapped)
    }
}

impl Drop for Gdr {
    fn drop(&mut self) {
        // SAFETY: it is open, and no mapping of it is left.
        let _ = unsafe { (self.functions.close)(self.raw) };
    }
}

/// GPU memory that GDRCopy mapped.
#[derive(Debug)]
pub struct Mapped<'g> {
    gdr: &'g Gdr,
    handle: Handle,
    at: Option<NonNull<c_void>>,
    bytes: usize,
}

impl Mapped<'_> {
    fn at(&self, offset: usize, bytes: usize) -> Result<*mut c_void, GdrError> {
        inside(offset, bytes, self.bytes)?;
        let start = self.at.ok_or(GdrError::Outside { offset, bytes, within: 0 })?;
        Ok(start.as_ptr().wrapping_byte_add(offset))
    }
}

impl Window for Mapped<'_> {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<(), GdrError> {
        let at = self.at(offset, from.len())?;
        // SAFETY: `from.len()` bytes inside the mapping, and as many of a slice.
        let status = unsafe { (self.gdr.functions.write)(self.handle, at, from.as_ptr().cast(), from.len()) };
        checked("gdr_copy_to_mapping", status)
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), GdrError> {
        let at = self.at(offset, to.len())?;
        // SAFETY: as in `write`.
        let status = unsafe { (self.gdr.functions.read)(self.handle, to.as_mut_ptr().cast(), at, to.len()) };
        checked("gdr_copy_from_mapping", status)
    }
}

impl Drop for Mapped<'_> {
    fn drop(&mut self) {
        let (functions, raw) = (&self.gdr.functions, self.gdr.raw);
        if let Some(at) = self.at {
            // SAFETY: mapped once, with this length.
            let _ = unsafe { (functions.unmap)(raw, self.handle, at.as_ptr(), self.bytes) };
        }
        // SAFETY: pinned once, and not mapped any more.
        let _ = unsafe { (functions.unpin)(raw, self.handle) };
    }
}
