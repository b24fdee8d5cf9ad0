//! Our kernels, loaded and launched. This is an unsafe module: arguments become pointers.
//!
//! It guarantees: each launch passes arguments of the types in `kernels/egm.cu`, and parts of memory that are at least
//! as long as the kernel's accesses.
#![expect(unsafe_code, reason = "the driver's functions have no safe interface")]

use std::ffi::{CString, c_uint, c_void};
use std::ptr;

use cudarc::driver::sys;
use sys::CUjit_option as Option_;

use crate::cuda::{Attribute, Context, CudaError, Part, Stream};

/// `kernels/egm.cu`, compiled for every GPU from compute capability 7.5; its first line has the source's hash.
pub const PTX: &str = include_str!("../../kernels/egm.ptx");

/// The names of the kernels, in the order in which they are launched by number.
pub const ENTRIES: [&str; 9] = [
    "egm_fill",
    "egm_check",
    "egm_add",
    "egm_produce",
    "egm_consume",
    "egm_read",
    "egm_write",
    "egm_copy",
    "egm_chase",
];

/// Words of a message: data, and at the end its number plus 1.
pub const MESSAGE_WORDS: u64 = 16;
/// Size of the mismatch report that a kernel writes, in 32-bit words.
const WRONG_WORDS: u64 = 4;
/// Size of the JIT error log, in bytes.
const LOG: usize = 4096;

#[derive(Clone, Copy)]
#[repr(usize)]
enum Entry {
    Fill,
    Check,
    Add,
    Produce,
    Consume,
    Read,
    Write,
    Copy,
    Chase,
}

/// Number of threads of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Blocks of the grid, which has one dimension.
    pub blocks: u32,
    /// Threads of a block, 1024 at most.
    pub threads: u32,
}

impl Shape {
    /// One block of one thread.
    pub const ONE: Self = Self { blocks: 1, threads: 1 };

    /// The shape that keeps the whole GPU busy with memory. An H200 writes 64 MiB of its own memory 3 % faster with it
    /// than with half as many blocks of twice as many threads.
    #[must_use]
    pub fn whole(context: &Context) -> Self {
        Self { blocks: 4 * processors(context), threads: 256 }
    }

    /// Half of [`Shape::whole`], so that two kernels run at the same time.
    #[must_use]
    pub fn half(context: &Context) -> Self {
        Self { blocks: 2 * processors(context), threads: 256 }
    }

    /// Its warps, on the GPU of `context`.
    #[must_use]
    pub fn warps(self, context: &Context) -> u64 {
        let threads =
            context.attributes().get(Attribute::WARP_SIZE).and_then(|number| u64::try_from(number).ok());
        self.count() / threads.unwrap_or(1).clamp(1, 256)
    }

    /// Number of threads in all blocks.
    #[must_use]
    pub fn count(self) -> u64 {
        u64::from(self.blocks) * u64::from(self.threads)
    }
}

fn processors(context: &Context) -> u32 {
    let number =
        context.attributes().get(Attribute::PROCESSORS).and_then(|number| u32::try_from(number).ok());
    number.unwrap_or(1).clamp(1, 4096)
}

/// Messages from one processor or GPU to another, with data of a pattern.
#[derive(Clone, Copy)]
pub struct Messages<'m> {
    /// Memory of the messages, [`MESSAGE_WORDS`] each: as many as it has room for.
    pub slots: Part<'m>,
    /// Seed of the pattern.
    pub seed: u64,
}

impl Messages<'_> {
    fn count(&self) -> u64 {
        self.slots.bytes() / 8 / MESSAGE_WORDS
    }
}

/// Memory in which a kernel reports.
#[derive(Clone, Copy)]
pub struct Reports<'r> {
    /// Differences, as in [`Kernels::check`]; the fourth word counts messages that did not come.
    pub wrong: Part<'r>,
    /// Its first word becomes 1 when the kernel starts, as in [`Kernels::add`].
    pub started: Part<'r>,
}

/// Our kernels on a GPU.
pub struct Kernels {
    context: Context,
    module: sys::CUmodule,
    entries: [sys::CUfunction; ENTRIES.len()],
}

impl Kernels {
    /// Makes the driver compile the kernels.
    ///
    /// # Errors
    /// [`CudaError::Kernels`] with the driver's log.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        let functions = context.enter()?;
        let image = CString::new(PTX).unwrap_or_default();
        let (mut module, mut log) = (ptr::null_mut(), [0_u8; LOG]);
        let mut options = [
            Option_::CU_JIT_ERROR_LOG_BUFFER as c_uint,
            Option_::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES as c_uint,
        ];
        // An option's value is a pointer, or a number in its place.
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), ptr::without_provenance_mut(LOG - 1)];
        let (text, options, values) = (image.as_ptr().cast(), options.as_mut_ptr(), values.as_mut_ptr());
        // SAFETY: text that ends with 0, two options and two values; the log's buffer is longer than its size option.
        let loaded = unsafe { functions.cuModuleLoadDataEx(&raw mut module, text, 2, options, values) };
        loaded.map_err(|source| {
            let end = log.iter().position(|byte| *byte == 0).unwrap_or(LOG);
            let log = String::from_utf8_lossy(log.get(..end).unwrap_or_default()).trim().to_owned();
            CudaError::Kernels { source: Box::new(source), log }
        })?;
        let mut kernels =
            Self { context: context.clone(), module, entries: [ptr::null_mut(); ENTRIES.len()] };
        for (entry, name) in kernels.entries.iter_mut().zip(ENTRIES) {
            let name = CString::new(name).unwrap_or_default();
            // SAFETY: a field's address, a loaded module, a name that ends with 0.
            unsafe { functions.cuModuleGetFunction(entry, module, name.as_ptr()) }?;
        }
        Ok(kernels)
    }

    /// Launches one with arguments of 64 bits, which are all that ours have.
    fn launch<const N: usize>(
        &self,
        stream: &Stream,
        entry: Entry,
        shape: Shape,
        mut arguments: [u64; N],
    ) -> Result<(), CudaError> {
        let function = self.entries[entry as usize];
        let mut places = arguments.each_mut().map(|argument| (&raw mut *argument).cast::<c_void>());
        let (functions, Shape { blocks, threads }) = (self.context.enter()?, shape);
        // SAFETY: as many pointers as the kernel has parameters, to values of their size, which are copied before this
        // returns; each public function below checks the kernel's range, and that it is mapped until the kernel ends.
        unsafe {
            functions.cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream.raw(),
                places.as_mut_ptr(),
                ptr::null_mut(),
            )
        }
    }

    /// Writes the pattern of `seed` to all of `to`.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn fill(&self, stream: &Stream, shape: Shape, to: Part<'_>, seed: u64) -> Result<(), CudaError> {
        self.launch(stream, Entry::Fill, shape, [to.within(stream.context())?, to.bytes() / 8, seed])
    }

    /// Compares all of `from` with the pattern of `seed`. `wrong` was zeroes: it gets how many words differ, and index and
    /// value of one of them.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn check(
        &self,
        stream: &Stream,
        shape: Shape,
        from: Part<'_>,
        seed: u64,
        wrong: Part<'_>,
    ) -> Result<(), CudaError> {
        room(wrong, WRONG_WORDS)?;
        self.launch(
            stream,
            Entry::Check,
            shape,
            [from.within(stream.context())?, from.bytes() / 8, seed, wrong.within(stream.context())?],
        )
    }

    /// Every thread adds 1 to the first word of `counter`, `times` times, visible to the whole machine; the first word of
    /// `started` becomes 1 before.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn add(
        &self,
        stream: &Stream,
        shape: Shape,
        counter: Part<'_>,
        times: u64,
        started: Part<'_>,
    ) -> Result<(), CudaError> {
        room(counter, 1)?;
        room(started, 1)?;
        self.launch(
            stream,
            Entry::Add,
            shape,
            [counter.within(stream.context())?, times, started.within(stream.context())?],
        )
    }

    /// Writes all `messages`, each complete before its number.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn produce(&self, stream: &Stream, shape: Shape, messages: Messages<'_>) -> Result<(), CudaError> {
        let Messages { slots, seed } = messages;
        let arguments = [slots.within(stream.context())?, messages.count(), seed];
        self.launch(stream, Entry::Produce, shape, arguments)
    }

    /// Waits for all `messages`, `limit` looks each, and compares them.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn consume(
        &self,
        stream: &Stream,
        shape: Shape,
        messages: Messages<'_>,
        limit: u64,
        reports: Reports<'_>,
    ) -> Result<(), CudaError> {
        let Reports { wrong, started } = reports;
        room(wrong, WRONG_WORDS)?;
        room(started, 1)?;
        let arguments = [
            messages.slots.within(stream.context())?,
            messages.count(),
            messages.seed,
            limit,
            wrong.within(stream.context())?,
            started.within(stream.context())?,
        ];
        self.launch(stream, Entry::Consume, shape, arguments)
    }

    /// Reads all of `from` by [`Shape::whole`]. The sum of each warp's words goes to its word of `sums`, which has room
    /// for a word of each thread. There are [`Shape::warps`] sums.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn read(&self, stream: &Stream, from: Part<'_>, sums: Part<'_>) -> Result<(), CudaError> {
        // Whole warps: its threads are a multiple of any warp's.
        let shape = Shape::whole(&self.context);
        room(sums, shape.count())?;
        let arguments = [from.within(stream.context())?, pairs(from)?, sums.within(stream.context())?];
        self.launch(stream, Entry::Read, shape, arguments)
    }

    /// Writes the pattern of `seed` to all of `to`, as fast as it goes.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn write(&self, stream: &Stream, shape: Shape, to: Part<'_>, seed: u64) -> Result<(), CudaError> {
        self.launch(stream, Entry::Write, shape, [to.within(stream.context())?, pairs(to)?, seed])
    }

    /// Copies all of `from` to `to`, which is as long.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn copy(&self, stream: &Stream, shape: Shape, to: Part<'_>, from: Part<'_>) -> Result<(), CudaError> {
        room(to, from.bytes() / 8)?;
        pairs(to)?;
        self.launch(
            stream,
            Entry::Copy,
            shape,
            [to.within(stream.context())?, from.within(stream.context())?, pairs(from)?],
        )
    }

    /// One thread follows `chain` for `steps` steps from word `start`, and writes its final index to the first word of
    /// `end`. Each word of `chain` must be smaller than their number: any other value causes an error of the GPU, which
    /// ends this context and has no effect outside it.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn chase(
        &self,
        stream: &Stream,
        chain: Part<'_>,
        start: u64,
        steps: u64,
        end: Part<'_>,
    ) -> Result<(), CudaError> {
        room(end, 1)?;
        let most = chain.bytes() / 8;
        if start >= most {
            return Err(CudaError::TooMuch { what: "the first word of a chain", is: start, most });
        }
        self.launch(
            stream,
            Entry::Chase,
            Shape::ONE,
            [chain.within(stream.context())?, start, steps, end.within(stream.context())?],
        )
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let _ = self.context.synchronize();
        if let Ok(functions) = self.context.enter() {
            // SAFETY: loaded once, by `new`, and nothing of it runs.
            let _ = unsafe { functions.cuModuleUnload(self.module) };
        }
    }
}

/// Whether `part` has room for so many words.
fn room(part: Part<'_>, words: u64) -> Result<(), CudaError> {
    let most = part.bytes() / 8;
    if words <= most { Ok(()) } else { Err(CudaError::TooMuch { what: "a result", is: words, most }) }
}

/// Number of 16-byte pieces of `part`; an error unless it consists of such pieces.
fn pairs(part: Part<'_>) -> Result<u64, CudaError> {
    let (offset, bytes) = (part.address(), part.bytes());
    if offset.is_multiple_of(16) && bytes.is_multiple_of(16) {
        return Ok(bytes / 16);
    }
    Err(CudaError::Part { offset, bytes, size: bytes, word: 16 })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use sha2::{Digest, Sha256};

    use super::*;

    #[test]
    fn the_compiled_kernels_are_those_of_the_source() {
        let hash = Sha256::digest(include_bytes!("../../kernels/egm.cu"));
        let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        let first = PTX.lines().next().unwrap();
        assert_eq!(first, format!("// egm.cu sha256 {hash}"), "cargo run -p egm-vendor --example ptx");
    }

    #[test]
    fn the_compiled_kernels_have_every_entry_that_is_named_and_no_other() {
        let entries = PTX.lines().filter_map(|line| line.strip_prefix(".visible .entry ")?.split('(').next());
        assert_eq!(entries.collect::<BTreeSet<_>>(), ENTRIES.into_iter().collect());
    }

    #[test]
    fn a_compiled_kernel_has_as_many_parameters_as_it_is_launched_with_all_of_64_bits() {
        let parameters = ENTRIES.map(|name| {
            let line = |line: &&str| line.contains(&format!("{name}_param_")) && line.contains(".param .u64");
            PTX.lines().filter(|line| line.trim_start().starts_with(".param")).filter(line).count()
        });
        assert_eq!(parameters, [3, 4, 3, 3, 6, 3, 3, 3, 4]);
    }

    #[test]
    fn any_gpu_from_compute_capability_7_5_and_any_driver_from_11_may_compile_them() {
        assert!(PTX.contains("\n.target sm_75\n") && PTX.contains("\n.version 7.0\n"));
    }
}
