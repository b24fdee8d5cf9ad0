//! The `egm-vmm` program; everything is in the library.

fn main() -> std::process::ExitCode {
    egm_vfio::client::attend().unwrap_or_else(egm_vmm::main)
}
