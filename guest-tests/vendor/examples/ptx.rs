//! Makes `kernels/egm.ptx` from `kernels/egm.cu` with `nvcc` (or `$NVCC`) and the `ptxas` in its folder:
//! `cargo run -p egm-vendor --example ptx`.
//!
//! The kernels need nothing newer than PTX 7.0, so the text declares that version whatever compiler wrote it: older
//! drivers accept it then. `ptxas` verifies the text.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use sha2::{Digest, Sha256};

const VERSION: &str = ".version 7.0";

fn main() -> Result<(), Box<dyn Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let (source, target) = (folder.join("egm.cu"), folder.join("egm.ptx"));
    let nvcc = PathBuf::from(env::var_os("NVCC").unwrap_or_else(|| "nvcc".into()));
    run(Command::new(&nvcc).args(["-ptx", "-arch=compute_75", "-O3", "-o"]).arg(&target).arg(&source))?;
    let hash: String = Sha256::digest(fs::read(&source)?).iter().map(|byte| format!("{byte:02x}")).collect();
    let lines = fs::read_to_string(&target)?;
    let lines: Vec<&str> =
        lines.lines().map(|line| if line.starts_with(".version ") { VERSION } else { line }).collect();
    fs::write(&target, format!("// egm.cu sha256 {hash}\n{}\n", lines.join("\n").trim_end()))?;
    let assembled = env::temp_dir().join(format!("egm-{}.cubin", std::process::id()));
    let checked = run(Command::new(nvcc.with_file_name("ptxas"))
        .args(["-arch=sm_90", "-o"])
        .arg(&assembled)
        .arg(&target));
    let _ = fs::remove_file(&assembled);
    checked?;
    println!("wrote {}", target.display());
    Ok(())
}

fn run(command: &mut Command) -> Result<(), Box<dyn Error>> {
    let status = command.status().map_err(|error| format!("{}: {error}", command.get_program().display()))?;
    if status.success() { Ok(()) } else { Err(format!("{command:?}: {status}").into()) }
}
