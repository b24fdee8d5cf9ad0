//! Safe bindings of the vendors' libraries that the guest checks use: CUDA's driver, libibverbs, NVSHMEM and GDRCopy.
//!
//! Each library is loaded at run time, so a program that is linked with this package starts where none is installed.
//!
//! ```text
//!  libcuda, libibverbs, libgdrapi, libnvshmem_host ──loaded──► library ──► safe types ──► checks of egm-guest
//!  (none installed) ──────────────────────────────────────────► error ──► skipped, with the reason
//! ```
//! ```
//! use egm_vendor::cuda::Driver;
//!
//! match Driver::open() {
//!     Ok(driver) => println!("{} GPUs", driver.devices()?.len()),
//!     Err(error) => println!("no CUDA here: {error}"),
//! }
//! # Ok::<(), egm_vendor::cuda::CudaError>(())
//! ```

pub mod cuda;
pub mod gdr;
pub mod nvshmem;
pub mod verbs;
