//! The driver and its GPUs. This is an unsafe module: calls that query.
//!
//! It guarantees: a [`Device`] is one that the driver listed, and every pointer that a call gets here is to a local
//! that outlives the call.
#![expect(unsafe_code, reason = "the driver's functions have no safe interface")]

use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

use egm_address::PciAddress;

use crate::cuda::functions::{self, Functions};
use crate::cuda::{Attribute, Attributes, CudaError, NUMBERS};

/// Maximum number of GPUs.
const MOST_DEVICES: i32 = 256;
/// Size of a name's buffer, in bytes.
const NAME: usize = 256;

/// An attribute of the link between two GPUs (`CUdevice_P2PAttribute`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum P2p {
    /// Its relative speed; 0 is fastest.
    Rank = 1,
    /// Whether one GPU can access the other's memory.
    Access = 2,
    /// Whether native atomic operations work over it.
    Atomics = 3,
}

/// The loaded driver, one a process.
#[derive(Clone, Copy)]
pub struct Driver {
    pub(crate) functions: &'static Functions,
}

impl Driver {
    /// Loads `libcuda.so.1` and initialises it, once.
    ///
    /// A program that is linked statically must not call this: a second libc would come with the library.
    ///
    /// # Errors
    /// [`CudaError`]: no library, a function that it lacks, or an error of `cuInit`.
    pub fn open() -> Result<Self, CudaError> {
        static LOADED: OnceLock<Result<Functions, &'static str>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| match functions::load() {
            Ok(functions) => Ok(functions),
            Err(CudaError::NoFunction(name)) => Err(name),
            Err(_) => Err(""),
        });
        let functions = match loaded {
            Ok(functions) => functions,
            Err("") => return Err(CudaError::NoLibrary),
            Err(name) => return Err(CudaError::NoFunction(name)),
        };
        // SAFETY: it takes no pointer, and may be called again.
        unsafe { functions.cuInit(0) }?;
        Ok(Self { functions })
    }

    /// The version of CUDA that the driver implements, as 13000 for 13.0.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn version(self) -> Result<i32, CudaError> {
        let mut version = 0;
        // SAFETY: a local's address.
        unsafe { self.functions.cuDriverGetVersion(&raw mut version) }?;
        Ok(version)
    }

    /// The GPUs that the driver shows to this process, by its numbers.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn devices(self) -> Result<Vec<Device>, CudaError> {
        let mut count = 0;
        // SAFETY: a local's address.
        unsafe { self.functions.cuDeviceGetCount(&raw mut count) }?;
        (0..count.min(MOST_DEVICES)).map(|ordinal| self.device(ordinal)).collect()
    }

    fn device(self, ordinal: c_int) -> Result<Device, CudaError> {
        let mut raw = 0;
        // SAFETY: a local's address.
        unsafe { self.functions.cuDeviceGet(&raw mut raw, ordinal) }?;
        Ok(Device { driver: self, ordinal, raw })
    }
}

/// A GPU that the driver listed (`CUdevice`).
#[derive(Clone, Copy)]
pub struct Device {
    pub(crate) driver: Driver,
    /// The driver's number, from 0.
    pub ordinal: i32,
    pub(crate) raw: c_int,
}

impl Device {
    /// Its name.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn name(self) -> Result<String, CudaError> {
        self.text(|text, length| {
            // SAFETY: a buffer of `length` bytes.
            unsafe { self.driver.functions.cuDeviceGetName(text, length, self.raw) }
        })
    }

    /// The driver that listed it.
    #[must_use]
    pub fn driver(self) -> Driver {
        self.driver
    }

    /// Its PCI address.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn pci_address(self) -> Result<PciAddress, CudaError> {
        let text = self.text(|text, length| {
            // SAFETY: a buffer of `length` bytes.
            unsafe { self.driver.functions.cuDeviceGetPCIBusId(text, length, self.raw) }
        })?;
        text.to_ascii_lowercase().parse().map_err(|_| CudaError::Text {
            call: "cuDeviceGetPCIBusId",
            text,
            form: "an address like 0000:01:00.0",
        })
    }

    fn text(self, ask: impl Fn(*mut c_char, c_int) -> Result<(), CudaError>) -> Result<String, CudaError> {
        let mut text = [0_u8; NAME];
        let length = c_int::try_from(NAME - 1).unwrap_or_default(); // the last 0 stays
        ask(text.as_mut_ptr().cast(), length)?;
        let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    /// Bytes of its own memory.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn memory(self) -> Result<u64, CudaError> {
        let mut bytes = 0_usize;
        // SAFETY: a local's address.
        unsafe { self.driver.functions.cuDeviceTotalMem_v2(&raw mut bytes, self.raw) }?;
        Ok(bytes as u64)
    }

    /// An attribute, by its number in `cuda.h`.
    ///
    /// # Errors
    /// [`CudaError::Call`] with `CUDA_ERROR_INVALID_VALUE` when this driver knows no such number.
    pub fn attribute(self, number: i32) -> Result<i32, CudaError> {
        let mut value = 0;
        // SAFETY: a local's address; the driver checks the number.
        unsafe { self.driver.functions.cuDeviceGetAttribute(&raw mut value, number, self.raw) }?;
        Ok(value)
    }

    /// All of [`NUMBERS`] that the driver knows.
    #[must_use]
    pub fn attributes(self) -> Attributes {
        let value = |attribute: &Attribute| {
            self.attribute(attribute.number).ok().map(|value| (attribute.number, value))
        };
        NUMBERS.iter().filter_map(value).collect()
    }

    /// Whether it may reach memory of `peer`.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn can_access(self, peer: Self) -> Result<bool, CudaError> {
        let mut can = 0;
        // SAFETY: a local's address.
        unsafe { self.driver.functions.cuDeviceCanAccessPeer(&raw mut can, self.raw, peer.raw) }?;
        Ok(can != 0)
    }

    /// An attribute of the link from this GPU to `peer`, from the driver.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn p2p(self, peer: Self, what: P2p) -> Result<i32, CudaError> {
        let mut value = 0;
        let functions = self.driver.functions;
        // SAFETY: a local's address.
        unsafe { functions.cuDeviceGetP2PAttribute(&raw mut value, what as i32, self.raw, peer.raw) }?;
        Ok(value)
    }
}
