//! Reasons why a check could not decide its claim.

use std::io;
use std::path::PathBuf;

/// Reason why a check broke; it decides nothing about the claim.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    /// A file of the guest's kernel cannot be used.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// Verb of the message: `read`, `open`, …
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        source: io::Error,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// Beginning of the message, such as `cannot start ib_write_bw`.
        what: String,
        source: io::Error,
    },
    /// A text of the guest's kernel does not have the expected form.
    #[error("{what} contains {text:?}, which is not {form}")]
    Text {
        /// The file or field that contains `text`.
        what: String,
        text: String,
        form: &'static str,
    },
    /// The plan is not one.
    #[error("{} is not a plan: {source}; write it with `egm-vmm plan --json`", path.display())]
    Plan {
        /// Path of the file.
        path: PathBuf,
        source: serde_json::Error,
    },
    /// The plan is of another version.
    #[error("plan version {0} is not known here: use agent and VMM of one build")]
    PlanVersion(u32),
    /// An argument is not `KEY=VALUE`, or its value is not what the check takes.
    #[error("argument {0:?} {1}")]
    Argument(String, &'static str),
    /// An error of CUDA's driver.
    #[error(transparent)]
    Cuda(#[from] egm_vendor::cuda::CudaError),
    /// A reason in words, such as another process of a validation gives.
    #[error("{0}")]
    Other(String),
    /// RDMA does not do what it should be able to.
    #[error("{0}")]
    Rdma(#[from] egm_vendor::verbs::VerbsError),
    /// An ACPI table is malformed.
    #[error("ACPI table {0}")]
    Acpi(#[from] crate::acpi::AcpiError),
}

impl Broken {
    /// For `map_err` on a file operation.
    pub(crate) fn file<E: Into<io::Error>>(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(E) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source: source.into() }
    }

    /// For `map_err` on a system call.
    pub(crate) fn system<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::System { what, source: source.into() }
    }

    /// A text that is not of the form that it should have.
    pub(crate) fn text(what: impl Into<String>, text: &str, form: &'static str) -> Self {
        Self::Text { what: what.into(), text: text.chars().take(80).collect(), form }
    }
}
