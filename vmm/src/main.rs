//! The `egm-vmm` program; everything is in the library.

fn main() -> std::process::ExitCode {
    egm_vmm::cli::main()
}
