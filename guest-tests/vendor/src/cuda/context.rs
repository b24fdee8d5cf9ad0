//! A GPU's primary context, streams and events. This is an unsafe module: it owns handles of the driver.
//!
//! It guarantees: a handle is destroyed once, after its work has ended and before its context goes. Every call makes
//! the context current first, so that a thread may use several GPUs.
#![expect(unsafe_code, reason = "the driver's functions have no safe interface")]

use std::ptr;
use std::rc::Rc;

use cudarc::driver::sys;

use crate::cuda::functions::Functions;
use crate::cuda::{Attributes, CudaError, Device};

/// `CU_STREAM_NON_BLOCKING`: no order between this stream and the default one.
const NON_BLOCKING: u32 = 1;

/// The primary context of a GPU, for one thread.
#[derive(Clone)]
pub struct Context(Rc<Primary>);

struct Primary {
    device: Device,
    raw: sys::CUcontext,
    attributes: Attributes,
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: it was retained once, by `Context::new`, and everything made in it holds an `Rc` of this.
        let _ = unsafe { self.device.driver.functions.cuDevicePrimaryCtxRelease_v2(self.device.raw) };
    }
}

impl Context {
    /// The primary context of `device`.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn new(device: Device) -> Result<Self, CudaError> {
        let mut raw = ptr::null_mut();
        // SAFETY: a local's address.
        unsafe { device.driver.functions.cuDevicePrimaryCtxRetain(&raw mut raw, device.raw) }?;
        Ok(Self(Rc::new(Primary { device, raw, attributes: device.attributes() })))
    }

    /// The GPU that this is the primary context of.
    #[must_use]
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// Attributes that the driver reports for the GPU.
    #[must_use]
    pub fn attributes(&self) -> &Attributes {
        &self.0.attributes
    }

    /// Whether this and `other` are the same to the driver.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.0.raw == other.0.raw
    }

    /// The driver's functions, with this context current.
    pub(crate) fn enter(&self) -> Result<&'static Functions, CudaError> {
        let functions = self.0.device.driver.functions;
        // SAFETY: the context is retained.
        unsafe { functions.cuCtxSetCurrent(self.0.raw) }?;
        Ok(functions)
    }

    /// Waits until the GPU has completed all queued work.
    ///
    /// # Errors
    /// [`CudaError::Call`], of this or of work that failed before.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: it takes nothing.
        unsafe { self.enter()?.cuCtxSynchronize() }
    }

    /// Free bytes of the GPU's memory.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn free_memory(&self) -> Result<u64, CudaError> {
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: locals' addresses.
        unsafe { self.enter()?.cuMemGetInfo_v2(&raw mut free, &raw mut total) }?;
        Ok(free as u64)
    }
}

/// A queue of work for a GPU (`CUstream`), done in order. Dropping it waits for that work.
pub struct Stream {
    context: Context,
    raw: sys::CUstream,
}

impl Stream {
    /// A new one.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        let mut raw = ptr::null_mut();
        // SAFETY: a local's address.
        unsafe { context.enter()?.cuStreamCreate(&raw mut raw, NON_BLOCKING) }?;
        Ok(Self { context: context.clone(), raw })
    }

    /// The context that it was made in, and that its work runs in.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The driver's handle, for libraries that queue work of their own.
    #[must_use]
    pub fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Waits until its work is done.
    ///
    /// # Errors
    /// [`CudaError::Call`], of this or of the work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream is ours.
        unsafe { self.context.enter()?.cuStreamSynchronize(self.raw) }
    }

    /// Records the time when the work queued so far is done.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both handles are alive.
        unsafe { self.context.enter()?.cuEventRecord(event.raw, self.raw) }
    }

    /// Makes all later work in this stream wait for `event`.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both handles are alive.
        unsafe { self.context.enter()?.cuStreamWaitEvent(self.raw, event.raw, 0) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.synchronize();
        if let Ok(functions) = self.context.enter() {
            // SAFETY: the handle is ours and goes with this.
            let _ = unsafe { functions.cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A time in a stream, of the GPU's clock.
pub struct Event {
    context: Context,
    raw: sys::CUevent,
}

impl Event {
    /// A new one.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        let mut raw = ptr::null_mut();
        // SAFETY: a local's address.
        unsafe { context.enter()?.cuEventCreate(&raw mut raw, 0) }?;
        Ok(Self { context: context.clone(), raw })
    }

    /// Seconds from this event to `end`; both have come.
    ///
    /// # Errors
    /// [`CudaError::Call`]; `CUDA_ERROR_NOT_READY` before they came.
    pub fn seconds_until(&self, end: &Self) -> Result<f64, CudaError> {
        let mut milliseconds = 0_f32;
        let functions = self.context.enter()?;
        // SAFETY: a local's address; both handles are alive.
        unsafe { functions.cuEventElapsedTime(&raw mut milliseconds, self.raw, end.raw) }?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(functions) = self.context.enter() {
            // SAFETY: the handle is ours; the driver keeps what a stream still needs of it.
            let _ = unsafe { functions.cuEventDestroy_v2(self.raw) };
        }
    }
}
