/* The type `SumReader`, a new reference; NULL with an exception. */
PyObject *make_sum_reader(void);
